"""cp_gather_indexer_k_quant_cache."""

from typing import Any

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
) -> Make:
    """Sequences of these lengths from `first_row` on; block_table has `pad` columns between rows."""

    def build(device: str) -> dict[str, Any]:
        bounds = [first_row]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        num_rows = max(bounds[-1] + more_rows, 0)
        pages = max((-(-length // block_kv) for length in lengths), default=0) if num_pages is None else num_pages
        blocks = len(lengths) * pages + 2 if num_blocks is None else num_blocks
        size = block_kv * (key_bytes + 4)
        cache = torch.randint(0, 256, (blocks, size + (gap or 0)), dtype=UINT8, device=device)
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
            "dst_k": torch.randint(0, 256, (num_rows, key_bytes), dtype=UINT8, device=device).view(dtype),
            "dst_scale": torch.zeros(scales, dtype=scale_dtype, device=device),
            "block_table": table,
            "cu_seq_lens": torch.tensor(bounds, dtype=INT32, device=device),
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Each row read and written once, and the tables."""
    rows = kwargs["dst_k"].nbytes + kwargs["dst_scale"].nbytes
    return 2 * rows + kwargs["block_table"].nbytes + kwargs["cu_seq_lens"].nbytes


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
        Case("b3-empty", make((0, 0, 0), more_rows=5), small=True),
        Case("b0", make((), more_rows=3), small=True),
        Case("b2-no-rows", make((0, 0)), small=True),
        Case("b2-no-blocks", make((3, 4), num_blocks=0, num_pages=1, scale_dtype=F32), small=True),
        Case("b2-past-the-end", make((3, 40), more_rows=-20), small=True),
        Case("b300-w132", make(tuple(i % 37 * 11 for i in range(300)), holes=True, more_rows=100)),
        Case("b2-w132-long", make((70_001, 3), scale_dtype=F32)),
        Case("b1-w68", make((5000,), 64, block_kv=128, scale_dtype=INT32, gap=64)),
        bench_case("b1-t131072", make((131072,)), model_shape=True),
        bench_case("b32-t131072", make((4096,) * 32)),
        bench_case("b256-t32768", make((128,) * 256), model_shape=True),
        bench_case("b1-t2048", make((2048,))),
    ),
)

test_tiers = tiers.tests(SPEC)


def naive(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Bytes of dst_k and dst_scale, key by key."""
    dst_k = kwargs["dst_k"].view(UINT8).clone()
    dst_scale = kwargs["dst_scale"].view(UINT8).view(len(dst_k), 4).clone()
    blocks = [list(block.contiguous().view(-1)) for block in kwargs["kv_cache"].unbind(0)]
    block_kv, size = kwargs["kv_cache"].shape[1], dst_k.shape[1]
    bounds = kwargs["cu_seq_lens"].tolist()
    for table, begin, end in zip(kwargs["block_table"].tolist(), bounds, bounds[1:]):
        for i in range(min(end, len(dst_k)) - begin):
            block = table[i // block_kv] if i // block_kv < len(table) else -1
            key = i % block_kv
            bytes_ = [0] * (size + 4)
            if 0 <= block < len(blocks):
                sf = block_kv * size + 4 * key
                bytes_ = [*blocks[block][key * size : (key + 1) * size], *blocks[block][sf : sf + 4]]
            dst_k[begin + i] = torch.tensor(bytes_[:size], dtype=UINT8)
            dst_scale[begin + i] = torch.tensor(bytes_[size:], dtype=UINT8)
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
