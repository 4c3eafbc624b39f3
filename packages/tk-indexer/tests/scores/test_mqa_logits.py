"""fp8_fp4_mqa_logits and fp8_mqa_logits."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import tk_indexer
from tk_core import env
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.numeric import assert_same_metadata, calc_diff
from tk_core.testing.trees import empty
from tk_indexer import reference
from tk_indexer.lib.rows import DIMS, FP4_DIMS, NUM_HEADS
from tk_indexer.reference.casts import widen_rows
from tk_indexer.scores.dense import run_length

INF, NAN = math.inf, math.nan
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
FLOAT4 = torch.float4_e2m1fn_x2


def windows(kind: str, rows: int, keys: int, device: str) -> tuple[Tensor, Tensor]:
    """Starts and ends of the rows' windows."""
    row = torch.arange(rows, device=device)
    if kind == "full":
        starts, ends = torch.zeros_like(row), torch.full_like(row, keys)
    elif kind == "causal":  # the last rows of a sequence
        starts, ends = torch.zeros_like(row), row + keys - rows + 1
    elif kind == "packed":  # sequences one behind another, of unequal length
        length = max(keys // 5, 1)
        starts = torch.randint(0, 6, (rows,), device=device).sort().values * length
        ends = starts + torch.randint(0, length + 9, (rows,), device=device)
    elif kind == "context-parallel":  # two far chunks of queries
        starts, ends = torch.zeros_like(row), torch.where(row < rows // 2, row + 1, keys - rows + row + 1)
    else:  # any, some empty, some past the keys
        starts = torch.randint(-9, keys + 9, (rows,), device=device)
        ends = torch.randint(-9, keys + 9, (rows,), device=device)
    return starts.int(), ends.int()


def fp4_rows(*shape: int, device: str, dtype: torch.dtype, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Any codes; the factors of a row's groups differ by up to 2⁶. Those past the row are any bytes."""
    *shape, dim = shape
    data = torch.randint(0, 256, (*shape, dim // 2), dtype=torch.uint8, device=device)
    factors = torch.randint(119, 130, (*shape, 1), device=device) + torch.randint(0, 7, (*shape, 4), device=device)
    factors[..., dim // 32 :] = torch.randint(0, 256, (*shape, 4 - dim // 32), device=device)
    sf = torch.empty(*shape, dtype=torch.int32, device=device)  # With the usual strides, also where it is empty.
    sf.copy_(factors.to(torch.uint8).view(torch.int32)[..., 0])
    return (data & 0x77 if positive else data).view(dtype), sf


def make(
    rows: int,
    keys: int,
    num_heads: int = 64,
    dim: int = 128,
    window: str = "full",
    *,
    fp4: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    max_seqlen: int = 0,
    positive: bool = False,
    pad: int = 0,
) -> Make:
    """Normal or positive operands, factors of many powers of two, weights with `pad` elements between rows."""

    def build(device: str) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            x = torch.randn(shape, device=device)
            return x.abs() if positive else x

        weights = empty(rows, num_heads + pad, dtype=torch.float32, device=device).fill_(NAN)[:, :num_heads]
        weights.copy_(normal(rows, num_heads))
        starts, ends = windows(window, rows, keys, device)
        if fp4 is None:
            factors = torch.exp2(torch.randint(-6, 7, (keys,), device=device).float())
            q, kv = (normal(rows, num_heads, dim).to(E4M3), None), ((normal(keys, dim) * 4).to(E4M3), factors)
        else:
            options = {"device": device, "dtype": fp4, "positive": positive}
            q, kv = fp4_rows(rows, num_heads, dim, **options), fp4_rows(keys, dim, **options)
        return {
            "q": q,
            "kv": kv,
            "weights": weights,
            "cu_seq_len_k_start": starts,
            "cu_seq_len_k_end": ends,
            "max_seqlen_k": max_seqlen,
            "logits_dtype": dtype,
        }

    return build


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """-inf and NaN at the same places, and between the other float32 scores calc_diff below 1e-7, bfloat16 3e-6."""
    assert_same_metadata(actual, expected, "logits")
    if not expected.numel():
        return
    for kind in (torch.isneginf, torch.isnan):
        assert torch.equal(kind(actual), kind(expected)), f"logits: expected {kind.__name__} where the reference is"
    is_finite = expected.isfinite()
    limit = 1e-7 if expected.dtype is torch.float32 else 3e-6
    diff = calc_diff(actual.where(is_finite, 0), expected.where(is_finite, 0))
    assert diff < limit, f"logits: expected a difference below {limit}, got {diff:.3g}"


def bench(rows: int, keys: int, num_heads: int, dim: int, fp4: torch.dtype | None = None, **more: Any) -> Case:
    name = f"s{rows}-n{keys}-h{num_heads}-d{dim}{'' if fp4 is None else '-fp4'}"
    return bench_case(name, make(rows, keys, num_heads, dim, fp4=fp4), **more)


SPEC = OpSpec(
    op=tk_indexer.fp8_fp4_mqa_logits,
    compare=assert_close,
    cases=(
        Case("s5-n300-h64-d128", make(5, 300), small=True, modes=True),
        Case("s7-n301-h64-d128-any-pad", make(7, 301, window="any", pad=3), small=True),
        Case("s9-n129-h32-d64-any-bf16", make(9, 129, 32, 64, "any", dtype=BF16), small=True, modes=True),
        Case("s33-n200-h16-d32-causal", make(33, 200, 16, 32, "causal"), small=True),
        Case("s6-n300-h64-d128-packed-max100", make(6, 300, window="packed", max_seqlen=100), small=True, modes=True),
        Case("s5-n20-h64-d128-max77-bf16", make(5, 20, max_seqlen=77, dtype=BF16), small=True),
        Case("s5-n300-h64-d128-fp4", make(5, 300, fp4=torch.int8), small=True, modes=True, compile=True),
        Case("s9-n129-h16-d64-any-fp4-bf16", make(9, 129, 16, 64, "any", fp4=FLOAT4, dtype=BF16, pad=3), small=True),
        Case(
            "s6-n300-h32-d64-packed-max100-fp4",
            make(6, 300, 32, 64, "packed", fp4=torch.uint8, max_seqlen=100),
            small=True,
        ),
        Case("s1-n1-h16-d128-fp4", make(1, 1, 16, fp4=torch.int8), small=True),
        Case("s0-n20-h64-d128-fp4", make(0, 20, fp4=torch.int8), small=True),
        Case("s5-n0-h64-d128-fp4", make(5, 0, fp4=torch.int8), small=True),
        Case("s0-n20-h64-d128", make(0, 20), small=True),
        Case("s5-n0-h64-d128", make(5, 0), small=True),
        Case("s5-n0-h64-d128-max9", make(5, 0, max_seqlen=9), small=True),
        Case("s1-n1-h16-d128", make(1, 1, 16), small=True),
        *(
            Case(
                f"s{40 + h}-n{1000 + d + h}-h{h}-d{d}-{window}",
                make(40 + h, 1000 + d + h, h, d, window, dtype=dtype),
                compile=(h, d) in ((64, 128), (16, 32), (32, 64)),
            )
            for (h, d), window, dtype in zip(
                product(NUM_HEADS, DIMS),
                ("any", "causal", "packed", "context-parallel", "full", "any", "packed", "causal", "any"),
                (torch.float32, BF16, torch.float32) * 3,
            )
        ),
        *(
            Case(
                f"s{50 + h}-n{2000 + d + h}-h{h}-d{d}-{window}-fp4",
                make(50 + h, 2000 + d + h, h, d, window, fp4=fp4),
                compile=(h, d) == (16, 64),
            )
            for (h, d), window, fp4 in zip(
                product(NUM_HEADS, FP4_DIMS),
                ("any", "causal", "packed", "context-parallel", "full", "any"),
                (torch.int8, torch.uint8, FLOAT4) * 2,
            )
        ),
        Case("s515-n4111-h64-d128-causal", make(515, 4111, window="causal")),
        Case("s300-n70001-h64-d128-packed", make(300, 70_001, window="packed")),
        Case(
            "s513-n3000-h32-d128-context-parallel-max1700",
            make(513, 3000, 32, window="context-parallel", max_seqlen=1700),
        ),
        bench(2048, 8192, 64, 128, model_shape=True),
        bench(2048, 65536, 64, 128, model_shape=True),
        bench(8192, 8192, 32, 128, model_shape=True),
        bench(2048, 65536, 64, 64),
        bench(128, 65536, 64, 128),
        bench(2048, 65536, 16, 128),
        bench(2048, 8192, 64, 128, torch.int8, model_shape=True),
        bench(2048, 65536, 64, 128, torch.int8, model_shape=True),
        bench(8192, 8192, 32, 128, torch.int8),
        bench(128, 65536, 64, 128, torch.int8),
        bench(2048, 65536, 64, 64, torch.int8),
        bench_case("s2048-n65536-h64-d128-causal", make(2048, 65536, window="causal")),
        bench_case("s2048-n65536-h64-d128-packed", make(2048, 65536, window="packed")),
        bench_case("s2048-n65536-h64-d128-bf16", make(2048, 65536, dtype=BF16)),
    ),
)


test_tiers = tiers.tests(SPEC)


# ---- by hand


def logits(
    q: Tensor, k: Tensor, sf: list[float], weights: Tensor, starts: list[int], ends: list[int], **more: Any
) -> Any:
    bounds = [torch.tensor(x, dtype=torch.int32) for x in (starts, ends)]
    operands = (q.to(E4M3), None), (k.to(E4M3), torch.tensor(sf, dtype=torch.float32)), weights
    return tk_indexer.fp8_fp4_mqa_logits(*operands, *bounds, **more)


def operands_by_hand() -> tuple[Tensor, Tensor, Tensor]:
    """Heads 0 and 1 see channels 0 and 1; three keys."""
    q, k, weights = torch.zeros(2, 16, 32), torch.zeros(3, 32), torch.zeros(2, 16)
    q[0, 0, 0], q[0, 1, 1], q[1, 0, 0] = 2, 3, -1
    k[0, 0], k[0, 1], k[1, 0], k[2, 1] = 1, 4, -8, 5
    weights[0, 0], weights[0, 1], weights[1, 0] = 10, -1, 7
    return q, k, weights


def test_by_hand() -> None:
    q, k, weights = operands_by_hand()
    # Row 0: 10·max(2·k0, 0) - max(3·k1, 0); row 1: 7·max(-k0, 0).
    assert logits(q, k, [1, 2, 0.5], weights, [0, 0], [3, 3]).tolist() == [[20 - 12, 0, -7.5], [0, 112, 0]]
    assert logits(q, k, [1, 2, 0.5], weights, [1, -5], [9, 2]).tolist() == [[-INF, 0, -7.5], [0, 112, -INF]]
    cut = logits(q, k, [1, 2, 0.5], weights, [1, 0], [3, 1], max_seqlen_k=4)
    assert cut.tolist() == [[0, -7.5, -INF, -INF], [0, -INF, -INF, -INF]]
    assert logits(q, k, [1, 2, 0.5], weights, [0, 0], [3, 3], max_seqlen_k=1).tolist() == [[8], [0]]
    assert cut.stride() == (256, 1)


def test_nan_is_where_it_came_from() -> None:
    q, k, weights = operands_by_hand()
    factors = [1.0, NAN, 1.0]
    assert [math.isnan(x) for x in logits(q, k, factors, weights, [0, 0], [3, 3]).flatten().tolist()] == [0, 1, 0] * 2
    for name in ("q", "k", "weights"):
        q, k, weights = operands_by_hand()
        {"q": q[1], "k": k[1], "weights": weights[1]}[name].view(-1)[5] = NAN
        is_nan = logits(q, k, [1.0, 1, 1], weights, [0, 0], [3, 3]).isnan()
        rows, cols = ([0, 1], [1]) if name == "k" else ([1], [0, 1, 2])
        assert is_nan.nonzero().tolist() == [[r, c] for r in rows for c in cols]
    q, k, weights = operands_by_hand()
    k[1] = NAN
    assert logits(q, k, [1, NAN, 1], weights, [2, 0], [3, 1]).tolist() == [[-INF, -INF, -15], [0, -INF, -INF]]


@pytest.mark.parametrize("positive", [False, True])
def test_against_float64(positive: bool, device: str) -> None:
    """Each element too: a wrong key would be 24 times as far off."""
    torch.manual_seed(0)
    kwargs = make(67, 1111, positive=positive)(device)
    (q, _), (k, sf), weights = kwargs["q"], kwargs["kv"], kwargs["weights"]
    products = torch.einsum("shd,nd->shn", q.double(), k.double())
    expected = (products.clamp(min=0) * weights.double()[..., None]).sum(1) * sf.double()
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    assert calc_diff(found, expected) < (1e-6 if positive else 1e-7)
    sizes = torch.einsum("shd,nd->shn", q.double().abs(), k.double().abs())
    limit = 2**-9 * sf.double() * (sizes * weights.double().abs()[..., None]).sum(1)
    assert ((found.double() - expected).abs() <= limit).all()


def fp4_values(x: tuple[Tensor, Tensor]) -> Tensor:
    """The values of FP4 rows in float64."""
    codes, sf = (part.cpu().contiguous().view(torch.uint8).numpy() for part in (x[0], x[1][..., None]))
    values = np.stack((codes & 15, codes >> 4), axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values = values.reshape(*codes.shape[:-1], -1, 32)
    factors = sf[..., : values.shape[-2], None].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return torch.from_numpy((values * factors).reshape(*codes.shape[:-1], -1))


@pytest.mark.parametrize(("num_heads", "dim"), [(64, 128), (16, 64)])
@pytest.mark.parametrize("positive", [False, True])
def test_fp4_against_float64(num_heads: int, dim: int, positive: bool, device: str) -> None:
    torch.manual_seed(0)
    kwargs = make(37, 511, num_heads, dim, fp4=torch.int8, positive=positive)(device)
    q, k, weights = fp4_values(kwargs["q"]), fp4_values(kwargs["kv"]), kwargs["weights"].cpu().double()[..., None]
    products = torch.einsum("shd,nd->shn", q, k)
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs).cpu()
    assert calc_diff(found, (products.clamp(min=0) * weights).sum(1)) < (1e-6 if positive else 1e-7)
    limit = 2**-9 * (torch.einsum("shd,nd->shn", q.abs(), k.abs()) * weights.abs()).sum(1)
    assert ((found.double() - (products.clamp(min=0) * weights).sum(1)).abs() <= limit).all()


def test_fp4_scores_are_those_of_widened_rows(device: str) -> None:
    """Bit for bit, with a query's factors in the weights; also where widening rounds."""
    torch.manual_seed(0)
    kwargs = make(9, 300, window="any", fp4=torch.uint8)(device)
    (q, q_sf), (k, k_sf) = kwargs["q"], kwargs["kv"]
    k_sf.view(torch.uint8)[::8] += 30
    wide, factors = widen_rows(q, q_sf)
    fp8 = {**kwargs, "q": (wide, None), "kv": widen_rows(k, k_sf), "weights": kwargs["weights"] * factors}
    assert_equal(tk_indexer.fp8_fp4_mqa_logits(**kwargs), tk_indexer.fp8_fp4_mqa_logits(**fp8))


def test_fp4_factors_that_are_nan(device: str) -> None:
    """Byte 255 of a query's head makes its row NaN, of a key its column; past the channels it does not matter."""
    kwargs = make(5, 70, 16, 64, fp4=torch.int8)(device)
    expected = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    q_sf, k_sf = (x[1][..., None].view(torch.uint8) for x in (kwargs["q"], kwargs["kv"]))
    q_sf[..., 2:], k_sf[..., 2:] = 255, 255
    assert_equal(tk_indexer.fp8_fp4_mqa_logits(**kwargs), expected)
    q_sf[3, 7, 1], k_sf[40, 0] = 255, 255
    row, column = torch.arange(5, device=device)[:, None], torch.arange(70, device=device)
    is_nan = (row == 3) | (column == 40)
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan], expected[~is_nan])


def test_chunks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make(7, 50, window="any", max_seqlen=33)("cpu")
    whole = reference.fp8_fp4_mqa_logits(**kwargs)
    monkeypatch.setattr("tk_indexer.reference.scores._CHUNK_BYTES", 3 * 8 * 64 * 50)
    assert_close(reference.fp8_fp4_mqa_logits(**kwargs), whole)


def test_fp8_mqa_logits_is_a_view(device: str) -> None:
    kwargs = make(5, 300, window="any", max_seqlen=200)(device)
    expected = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    del kwargs["logits_dtype"]
    assert_equal(tk_indexer.fp8_mqa_logits(**{**kwargs, "q": kwargs["q"][0]}), expected)


def test_bfloat16_is_float32_rounded_once(device: str) -> None:
    kwargs = make(9, 500, window="any")(device)
    expected = tk_indexer.fp8_fp4_mqa_logits(**kwargs).bfloat16()
    found = tk_indexer.fp8_fp4_mqa_logits(**{**kwargs, "logits_dtype": BF16})
    assert_equal(found.contiguous(), expected.contiguous())


def test_selection_needs_no_lengths(device: str) -> None:
    kwargs = make(9, 500, window="any")(device)
    scores = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    starts, ends = kwargs["cu_seq_len_k_start"], kwargs["cu_seq_len_k_end"]
    columns = tk_indexer.topk_indices(scores, 100, starts, ends)
    cut = tk_indexer.fp8_fp4_mqa_logits(**{**kwargs, "max_seqlen_k": 500})
    assert_equal(tk_indexer.topk_indices(cut, 100), columns)


# ---- bad input

GOOD = make(4, 6)("cpu")
Q, (K, SF), WEIGHTS = GOOD["q"][0], GOOD["kv"], GOOD["weights"]
FP4 = make(4, 6, fp4=torch.int8)("cpu")

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"q": Q}, TypeError, r"^q: expected a pair \(data, sf or None\)"),
        ({"q": (Q, SF)}, TypeError, r"^q\[1\]: expected None"),
        ({"q": (Q[:, :8].contiguous(), None)}, ValueError, r"^q\[0\] \(H\).*16, 32, 64.*8"),
        ({"q": (torch.zeros(4, 64, 96).to(E4M3), None)}, ValueError, r"^q\[0\] \(D\).*32, 64, 128.*96"),
        ({**FP4, "q": (FP4["q"][0], None)}, TypeError, r"^q\[1\]: expected a torch.Tensor, got NoneType"),
        ({**FP4, "q": (FP4["q"][0], FP4["q"][1][:, :9])}, ValueError, r"^q\[1\].*shape \(4, 64\)"),
        ({**FP4, "q": (FP4["q"][0][..., :16].contiguous(), FP4["q"][1])}, ValueError, r"^q\[0\] \(D\).*64, 128.*32"),
        ({**FP4, "kv": (K, SF)}, TypeError, r"^kv\[0\]: expected dtype torch.int8 or.*e4m3"),
        ({**FP4, "kv": (FP4["kv"][0], SF)}, TypeError, r"^kv\[1\]: expected dtype torch.int32"),
        ({"kv": FP4["kv"]}, TypeError, r"^kv\[0\]: expected dtype torch.float8_e4m3fn"),
        ({"kv": K}, TypeError, "^kv: expected a pair"),
        ({"kv": (K[:, :64].contiguous(), SF)}, ValueError, r"^kv\[0\].*shape \(N, 128\)"),
        ({"kv": (K, SF[:5])}, ValueError, r"^kv\[1\].*shape \(6\)"),
        ({"weights": WEIGHTS[:, :32]}, ValueError, r"^weights.*shape \(4, 64\)"),
        ({"cu_seq_len_k_start": torch.zeros(3, dtype=torch.int32)}, ValueError, "^cu_seq_len_k_start.*shape"),
        ({"cu_seq_len_k_end": torch.zeros(5, dtype=torch.int32)}, ValueError, "^cu_seq_len_k_end.*shape"),
        ({"clean_logits": 128}, TypeError, "^clean_logits: expected a bool, got 128"),
        ({"max_seqlen_k": -1}, ValueError, "^max_seqlen_k"),
        ({"logits_dtype": torch.float16}, TypeError, "^logits_dtype"),
    ],
)


def test_debug_mode_refuses_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_indexer.fp8_fp4_mqa_logits(**GOOD)
    for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"):
        with pytest.raises(ValueError, match=f"{name}: expected .* below"):
            tk_indexer.fp8_fp4_mqa_logits(**{**GOOD, name: torch.tensor([0, 7, -1, 0], dtype=torch.int32)})


def test_other_architectures() -> None:
    with capture(arch_from_name("sm_120a")), pytest.raises(UnsupportedArchError, match=r"fp8_fp4_mqa_logits.*sm_120a"):
        tk_indexer.fp8_fp4_mqa_logits(**make(4, 600)("meta"))


def test_runs_are_even() -> None:
    """Of the busiest thread block's steps at most 4 % are more than its share, where there are enough keys."""
    for rows, keys, heads in product((1, 3, 128, 2048, 8192), (1, 8191, 65536, 2**20), NUM_HEADS):
        length = run_length(rows, keys, heads, 132)
        assert length % 128 == 0
        assert length > 0
        blocks, runs = -(-rows * heads // 384), -(-keys // length)
        assert (runs - 1) * length < keys
        steps = -(-blocks * runs // 132) * (length // 128)
        if rows * keys >= 2048 * 8192:
            assert steps <= 1.04 * blocks * keys / 128 / 132 + 1


# ---- on a GPU


@pytest.mark.gpu(gib=4)
@pytest.mark.parametrize("num_heads", NUM_HEADS)
def test_gpu_bits_do_not_depend_on_neighbours(num_heads: int) -> None:
    """A score is the same for any other queries, keys, windows and runs, and in 20 runs."""
    kwargs = make(37, 3000, num_heads, window="any")("cuda")
    (q, _), (k, sf), weights = kwargs["q"], kwargs["kv"], kwargs["weights"]

    def whole(rows: slice, keys: slice) -> Tensor:
        n, bound = len(k[keys]), torch.zeros(len(q[rows]), dtype=torch.int32, device="cuda")
        operands = (q[rows].clone(), None), (k[keys].clone(), sf[keys].clone()), weights[rows]
        return tk_indexer.fp8_fp4_mqa_logits(*operands, bound, bound + n)

    everything = whole(slice(None), slice(None))
    for _ in range(20):
        assert_equal(whole(slice(None), slice(None)), everything)
    for rows, keys in ((slice(0, 1), slice(0, 1)), (slice(5, 6), slice(77, 2999)), (slice(3, 37), slice(1, 130))):
        assert_equal(whole(rows, keys).flatten(), everything[rows, keys].flatten())
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    assert_equal(found.contiguous(), torch.where(found.isneginf(), -INF, everything).contiguous())
    column, starts = torch.arange(3000, device="cuda"), kwargs["cu_seq_len_k_start"].clamp(0, 3000)
    cut = tk_indexer.fp8_fp4_mqa_logits(**{**kwargs, "max_seqlen_k": 3000})
    moved = found.gather(1, (starts[:, None] + column).clamp(max=2999)).where(starts[:, None] + column < 3000, -INF)
    assert_equal(cut.contiguous(), moved.contiguous())


@pytest.mark.gpu
def test_gpu_nan_matters_only_where_it_is_read() -> None:
    kwargs = make(21, 700, window="packed")("cuda")
    expected = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    (k, sf) = kwargs["kv"]
    starts, ends = (x.clamp(0, 700)[:, None] for x in (kwargs["cu_seq_len_k_start"], kwargs["cu_seq_len_k_end"]))
    column = torch.arange(700, device="cuda")
    is_inside = (column >= starts) & (column < ends)
    unseen = ~is_inside.any(dim=0)
    assert unseen.any()
    k.view(torch.uint8)[unseen] = 0x7F
    sf[unseen] = NAN
    assert_equal(tk_indexer.fp8_fp4_mqa_logits(**kwargs), expected)
    k.view(torch.uint8)[300, 9] = 0xFF
    kwargs["q"][0].view(torch.uint8)[3, 7, 1] = 0x7F
    kwargs["weights"][5, 63] = NAN
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    row = torch.arange(21, device="cuda")[:, None]
    assert torch.equal(found.isnan(), is_inside & ((column == 300) | (row == 3) | (row == 5)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("max_seqlen", [0, 333])
def test_gpu_without_cleaning_windows_are_the_same(dtype: torch.dtype, max_seqlen: int) -> None:
    kwargs = make(50, 1003, window="any", dtype=dtype, max_seqlen=max_seqlen)("cuda")
    clean = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs, clean_logits=False)
    assert torch.equal(found.where(~clean.isneginf(), -INF), clean)


@pytest.mark.gpu(gib=12)
def test_gpu_offsets_past_32_bits() -> None:
    """2100 rows of 2²⁰ scores."""
    kwargs = make(2100, 2**20, 16, 32)("cuda")
    found = tk_indexer.fp8_fp4_mqa_logits(**kwargs)
    rows = slice(2090, 2100)
    few = {**kwargs, "q": (kwargs["q"][0][rows].clone(), None), "weights": kwargs["weights"][rows]}
    few |= {name: kwargs[name][rows].clone() for name in ("cu_seq_len_k_start", "cu_seq_len_k_end")}
    assert_close(found[rows], reference.fp8_fp4_mqa_logits(**few))
