"""cp_gather_indexer_k_quant_cache."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import tk_indexer
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

E4M3, UINT8, INT8, INT32, F32 = torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32, torch.float32


def make(
    lengths: tuple[int, ...],
    key_bytes: int = 128,
    *,
    block_kv: int = 64,
    dtype: torch.dtype = E4M3,
    scale_dtype: torch.dtype = UINT8,
    more_rows: int = 0,
    first_row: int = 0,
    num_pages: int | None = None,
    num_blocks: int | None = None,
    gap: int | None = None,
    pad: int = 0,
    holes: bool = False,
    wild: bool = False,
    span: int | None = None,
) -> Make:
    """Sequences of these lengths from `first_row` on; block_table has `pad` columns between rows.

    With `span` the cache's FP4 keys are widened; the factors of a key differ by at most that many powers of two.
    """

    def build(device: str) -> dict[str, Any]:
        bounds = [first_row]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        num_rows = max(bounds[-1] + more_rows, 0)
        pages = max((-(-length // block_kv) for length in lengths), default=0) if num_pages is None else num_pages
        blocks = len(lengths) * pages + 2 if num_blocks is None else num_blocks
        size = block_kv * (key_bytes + 4)
        cache = torch.randint(0, 256, (blocks, size + (gap or 0)), dtype=UINT8, device=device)
        if span is not None:
            least = torch.randint(0, 256 - span, (blocks, block_kv, 1), device=device)
            factors = least + torch.randint(0, span + 1, (blocks, block_kv, 4), device=device)
            cache[:, block_kv * key_bytes : size] = factors.view(blocks, block_kv * 4)
        cache = cache[:, :size].view(blocks, block_kv, *(() if gap is None else (1,)), key_bytes + 4)
        share = torch.rand(len(lengths), pages, device=device)
        table = torch.randint(0, max(blocks, 1), (len(lengths), pages + pad), dtype=INT32, device=device)[:, :pages]
        if holes:
            table.copy_(torch.where(share < 0.3, -1 - table, table))
        if wild:
            table.copy_(torch.where(share > 0.7, table + blocks, table))
        scales = (num_rows, 4) if scale_dtype == UINT8 else (num_rows,)
        return {
            "kv_cache": cache,
            "dst_k": torch.randint(
                0, 256, (num_rows, key_bytes * (1 if span is None else 2)), dtype=UINT8, device=device
            ).view(dtype),
            "dst_scale": torch.zeros(scales, dtype=scale_dtype, device=device),
            "block_table": table,
            "cu_seq_lens": torch.tensor(bounds, dtype=INT32, device=device),
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Each row read and written once, and the tables."""
    read = len(kwargs["dst_k"]) * kwargs["kv_cache"].shape[-1]
    written = kwargs["dst_k"].nbytes + kwargs["dst_scale"].nbytes
    return read + written + kwargs["block_table"].nbytes + kwargs["cu_seq_lens"].nbytes


SPEC = OpSpec(
    op=tk_indexer.cp_gather_indexer_k_quant_cache,
    mutates=("dst_k", "dst_scale"),
    least_bytes=least_bytes,
    cases=(
        Case("b3-w132", make((70, 0, 33)), small=True, modes=True, compile=True),
        Case(
            "b4-w132-holes-apart",
            make((5, 130, 64, 1), scale_dtype=F32, gap=16, pad=3, holes=True, wild=True, more_rows=7, first_row=2),
            small=True,
            modes=True,
        ),
        Case(
            "b3-w68-int8", make((31, 32, 33), 64, block_kv=32, dtype=INT8, scale_dtype=INT32), small=True, compile=True
        ),
        Case("b2-w36-pages-missing", make((300, 200), 32, block_kv=128, dtype=UINT8, num_pages=2, gap=0), small=True),
        Case("b3-w68-widened", make((31, 0, 70), 64, scale_dtype=F32, span=14), small=True, modes=True, compile=True),
        Case(
            "b4-w68-widened-rounded-holes-apart",
            make((5, 130, 64, 1), 64, gap=16, pad=3, holes=True, wild=True, more_rows=7, first_row=2, span=40),
            small=True,
        ),
        Case(
            "b2-w36-widened-pages-missing",
            make((300, 200), 32, block_kv=128, scale_dtype=INT32, num_pages=2, span=255),
            small=True,
            compile=True,
        ),
        Case(
            "b3-w36-float4",
            make((31, 32, 33), 32, block_kv=32, dtype=torch.float4_e2m1fn_x2),
            small=True,
        ),
        Case("b3-empty", make((0, 0, 0), more_rows=5), small=True),
        Case("b0", make((), more_rows=3), small=True),
        Case("b2-no-rows", make((0, 0)), small=True),
        Case("b2-no-blocks", make((3, 4), num_blocks=0, num_pages=1, scale_dtype=F32), small=True),
        Case("b2-past-the-end", make((3, 40), more_rows=-20), small=True),
        Case("b300-w132", make(tuple(i % 37 * 11 for i in range(300)), holes=True, more_rows=100)),
        Case("b2-w132-long", make((70_001, 3), scale_dtype=F32)),
        Case("b2-w68-widened-long", make((70_001, 3), 64, scale_dtype=F32, span=16)),
        Case("b300-w36-widened", make(tuple(i % 37 * 11 for i in range(300)), 32, holes=True, more_rows=100, span=255)),
        Case("b1-w68", make((5000,), 64, block_kv=128, scale_dtype=INT32, gap=64)),
        bench_case("b1-t131072", make((131072,)), model_shape=True),
        bench_case("b32-t131072", make((4096,) * 32)),
        bench_case("b256-t32768", make((128,) * 256), model_shape=True),
        bench_case("b1-t2048", make((2048,))),
        bench_case("b1-t131072-widened", make((131072,), 64, scale_dtype=F32, span=3), model_shape=True),
    ),
)

test_tiers = tiers.tests(SPEC)


def widened(data: list[int], sf: list[int]) -> tuple[list[int], list[int]]:
    """Bytes of a row of e4m3, and of its factor, from those of FP4, channel by channel."""
    codes = [nibble for byte in data for nibble in (byte & 15, byte >> 4)]
    largest = max(sf[: len(codes) // 32])
    of_row = max(largest - 6, 1)
    values = np.array(codes, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values *= [2.0 ** (sf[c // 32] - of_row) for c in range(len(codes))]
    factor = np.array([np.nan if largest == 255 else 2.0 ** (of_row - 127)], np.float32)
    return list(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)), list(factor.view(np.uint8))


def naive(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Bytes of dst_k and dst_scale, key by key."""
    dst_k = kwargs["dst_k"].view(UINT8).clone()
    dst_scale = kwargs["dst_scale"].view(UINT8).view(len(dst_k), 4).clone()
    blocks = [list(block.contiguous().view(-1)) for block in kwargs["kv_cache"].unbind(0)]
    block_kv, size = kwargs["kv_cache"].shape[1], kwargs["kv_cache"].shape[-1] - 4
    bounds = kwargs["cu_seq_lens"].tolist()
    for table, begin, end in zip(kwargs["block_table"].tolist(), bounds, bounds[1:]):
        for i in range(min(end, len(dst_k)) - begin):
            block = table[i // block_kv] if i // block_kv < len(table) else -1
            key = i % block_kv
            data, sf = [0] * dst_k.shape[1], [0] * 4
            if 0 <= block < len(blocks):
                of_sf = block_kv * size + 4 * key
                data, sf = blocks[block][key * size : (key + 1) * size], blocks[block][of_sf : of_sf + 4]
                if size < dst_k.shape[1]:
                    data, sf = widened([int(x) for x in data], [int(x) for x in sf])
            dst_k[begin + i] = torch.tensor(data, dtype=UINT8)
            dst_scale[begin + i] = torch.tensor(sf, dtype=UINT8)
    return dst_k, dst_scale


@pytest.mark.parametrize("case", [case for case in SPEC.cases if case.small], ids=lambda case: case.name)
def test_against_plain_python(case: Case) -> None:
    torch.manual_seed(0)
    kwargs = case.make("cpu")
    expected = naive(kwargs)
    tk_indexer.cp_gather_indexer_k_quant_cache(**kwargs)
    found = kwargs["dst_k"].view(UINT8), kwargs["dst_scale"].view(UINT8).view(-1, 4)
    assert_equal(found, expected)


def test_gathers_what_was_cast() -> None:
    """Keys that were written in any order come back in that of their sequences."""
    torch.manual_seed(0)
    lengths = (70, 5, 130)
    kwargs = make(lengths, scale_dtype=F32)("cpu")
    table = torch.randperm(len(kwargs["kv_cache"]), dtype=INT32)[:9].view(3, 3)
    k = torch.randn(sum(lengths), 128)
    slots = torch.cat(
        [table[b, torch.arange(n) // 64].long() * 64 + torch.arange(n) % 64 for b, n in enumerate(lengths)]
    )
    tk_indexer.indexer_k_quant_and_cache(k, kwargs["kv_cache"], slots, 128, "ue8m0")
    tk_indexer.cp_gather_indexer_k_quant_cache(**{**kwargs, "block_table": table})
    values = kwargs["dst_k"].float() * kwargs["dst_scale"][:, None]
    assert ((values - k).abs() <= k.abs() / 16 + kwargs["dst_scale"][:, None] * 2.0**-10).all()


def test_widened_values_are_those_that_were_cast(device: str) -> None:
    """While the factors of a key differ by at most 2¹⁴."""
    torch.manual_seed(0)
    kwargs = make((150,), 64, scale_dtype=F32, span=14)(device)
    cache, table = kwargs["kv_cache"], kwargs["block_table"]
    tk_indexer.cp_gather_indexer_k_quant_cache(**kwargs)
    copied = torch.empty(150, 64, dtype=UINT8, device=device), torch.empty(150, 4, dtype=UINT8, device=device)
    tk_indexer.cp_gather_indexer_k_quant_cache(cache, *copied, table, kwargs["cu_seq_lens"])
    codes, sf = (x.cpu().numpy() for x in copied)
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(150, 128)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(150, 4, 32)
    values *= 2.0 ** (sf.astype(np.int32)[..., None] - 127)
    found = kwargs["dst_k"].double().cpu() * kwargs["dst_scale"].double().cpu()[:, None]
    is_nan = kwargs["dst_scale"].isnan().cpu()
    assert torch.equal(is_nan, torch.from_numpy(sf == 255).any(1))
    assert torch.equal(found[~is_nan], torch.from_numpy(values).view(150, 128)[~is_nan])


# ---- bad input

GOOD: dict[str, Any] = {
    "kv_cache": torch.zeros(2, 32, 132, dtype=UINT8),
    "dst_k": torch.zeros(5, 128, dtype=UINT8),
    "dst_scale": torch.zeros(5, 4, dtype=UINT8),
    "block_table": torch.zeros(2, 1, dtype=INT32),
    "cu_seq_lens": torch.tensor([0, 3, 5], dtype=INT32),
}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"kv_cache": torch.zeros(2, 32, 100, dtype=UINT8)}, ValueError, "kv_cache .W.*36, 68, 132.*100"),
        ({"kv_cache": torch.zeros(2, 16, 132, dtype=UINT8)}, ValueError, "kv_cache .block_kv.*32, 64, 128.*16"),
        ({"kv_cache": torch.zeros(2, 32, 133, dtype=UINT8)[..., :132]}, ValueError, "kv_cache.*132 bytes apart.*133"),
        ({"dst_k": torch.zeros(5, 132, dtype=UINT8)}, ValueError, "dst_k.*shape.*128.*132"),
        ({"dst_k": torch.zeros(5, 256, dtype=E4M3)}, ValueError, "dst_k.*shape.*128.*256"),
        ({"kv_cache": torch.zeros(2, 32, 68, dtype=UINT8)}, ValueError, "dst_k.*shape.*64.*128"),
        (
            {"kv_cache": torch.zeros(2, 32, 68, dtype=UINT8), "dst_k": torch.zeros(5, 32, dtype=E4M3)},
            ValueError,
            "dst_k.*shape.*64.*32",
        ),
        ({"dst_scale": torch.zeros(4, 4, dtype=UINT8)}, ValueError, "dst_scale.*shape.*5, 4"),
        ({"dst_scale": torch.zeros(5, 4)}, ValueError, "dst_scale.*shape.*5"),
        ({"block_table": torch.zeros(3, 1, dtype=INT32)}, ValueError, "cu_seq_lens.*shape.*4.*3"),
        ({"cu_seq_lens": torch.zeros(2, dtype=INT32)}, ValueError, "cu_seq_lens.*shape.*3.*2"),
    ],
)


def test_debug_mode_refuses_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "block_table": {"block_table": torch.tensor([[0], [2]], dtype=INT32)},
        "cu_seq_lens": {"cu_seq_lens": torch.tensor([0, 3, 6], dtype=INT32)},
    }
    for options in bad.values():
        tk_indexer.cp_gather_indexer_k_quant_cache(**{**GOOD, **options})
    monkeypatch.setattr(env, "debug", lambda: True)
    for name, options in bad.items():
        with pytest.raises(ValueError, match=f"{name}: expected .* below"):
            tk_indexer.cp_gather_indexer_k_quant_cache(**{**GOOD, **options})
    tk_indexer.cp_gather_indexer_k_quant_cache(**{**GOOD, "block_table": torch.tensor([[1], [-5]], dtype=INT32)})
