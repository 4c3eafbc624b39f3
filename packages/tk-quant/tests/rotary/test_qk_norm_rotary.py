"""qk_norm_rotary."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.arch import arch_from_name
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.trees import transfer

from . import test_apply_rotary as rotary
from .test_apply_rotary import BF16, FP32

EPS = 1e-6
Weights = tuple[torch.dtype | None, torch.dtype | None]


def weights_of(kwargs: dict[str, Any], dtypes: Weights, of_heads: bool) -> Iterator[Tensor | None]:
    """Weights of query's and key's norms, one for each head or one for all."""
    for x, dtype in zip((kwargs["query"], kwargs["key"]), dtypes):
        if x is None or dtype is None:
            yield None
        else:
            yield (1 + 0.5 * torch.randn(x.shape[-2 if of_heads else -1 :], device=x.device)).to(dtype)


def make(
    shape: tuple[int, ...],
    rot: int,
    dtype: torch.dtype = BF16,
    *,
    weights: Weights | None = None,
    weights_of_heads: bool = False,
    eps: float = EPS,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    with_rstd: bool = False,
    **options: Any,
) -> Make:
    """Arguments for a query of this shape; `options` are those of apply_rotary's `make`."""

    def build(device: str) -> dict[str, Any]:
        given = {"seqlen_offset": 0, "interleaved": False} | rotary.make(shape, rot, dtype, **options)(device)
        of_query, of_key = weights_of(given, weights or (dtype, dtype), weights_of_heads)
        names = ("key", "positions", "interleaved", "seqlen_offset", "sin_cache", "out", "key_out")
        return {
            **{name: given[name] for name in ("query", "cos_sin_cache")},
            "query_weight": of_query,
            "key_weight": of_key,
            "eps": eps,
            **{name: given[name] for name in names},
            "weight_offset": weight_offset,
            "round_before_weight": round_before_weight,
            "with_rstd": with_rstd,
        }

    return build


def _case(name: str, shape: tuple[int, ...], rot: int, dtype: torch.dtype = BF16, roles: str = "", **more: Any) -> Case:
    flags = dict.fromkeys(("small", *roles.split()), True)
    return Case(f"{rotary._NAMES[dtype]}-{name}", make(shape, rot, dtype, **more), **flags)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """As apply_rotary's: weights are few, and rstd is not asked for."""
    return rotary.least_bytes(kwargs, outputs)


SPEC = OpSpec(
    op=tk_quant.qk_norm_rotary,
    mutates=("query", "key", "out", "key_out"),
    least_bytes=least_bytes,
    cases=(
        # A thread has both channels of its pairs: one thread a row, half a warp, several rows.
        _case("128-of-128", (5, 3, 128), 128, BF16, "compile modes", key_heads=2, with_rstd=True, positions="int64"),
        _case("interleaved-64-of-64", (7, 3, 64), 64, BF16, key_heads=1, interleaved=True),
        _case("32-of-32", (33, 5, 32), 32, BF16, weights=(FP32, FP32)),
        _case("512-of-512", (5, 3, 512), 512, BF16, with_rstd=True),
        _case("256-of-256", (5, 3, 256), 256, positions="int32", seqlen_offset=2),
        _case("128-of-128", (5, 3, 128), 128, FP32, "compile", key_heads=1, with_rstd=True),
        _case("interleaved-16-of-16", (70, 3, 16), 16, FP32, interleaved=True),
        # Through shared memory: channels that stay, half a vector at the end, idle lanes, one lane, several warps.
        _case("64-of-128", (5, 3, 128), 64, BF16, "compile modes", key_heads=2, to_out=True, positions="int64"),
        _case("interleaved-64-of-128", (5, 3, 128), 64, BF16, interleaved=True, positions="int32"),
        _case("24-of-40", (5, 3, 40), 24, BF16, to_out=True, with_rstd=True),
        _case("interleaved-24-of-40", (5, 3, 40), 24, key_heads=1, interleaved=True),
        _case("16-of-16", (70, 2, 16), 16, BF16),
        _case("192-of-192", (5, 3, 192), 192, BF16, key_heads=1),
        _case("504-of-1032", (2, 3, 1032), 504, BF16, "compile", with_rstd=True),
        _case("interleaved-512-of-1040", (2, 2, 1040), 512, BF16, interleaved=True),
        _case("64-of-8200", (2, 2, 8200), 64, BF16),
        _case("64-of-80", (5, 3, 80), 64, FP32, key_heads=1),
        _case("512-of-512", (3, 2, 512), 512, FP32, positions="outside"),
        # Options of the norm, and weights.
        _case("plain", (5, 3, 128), 128, BF16, weights=(None, None), key_heads=2),
        _case("plain-key", (5, 3, 64), 64, BF16, weights=(FP32, None), key_heads=2),
        _case("rounded", (5, 3, 128), 128, BF16, "modes", key_heads=2, round_before_weight=True),
        _case("rounded", (5, 3, 128), 64, FP32, round_before_weight=True),
        _case("gemma", (5, 3, 256), 256, key_heads=1, weight_offset=1.0, eps=3),
        _case("weights-of-heads", (5, 3, 128), 128, BF16, weights_of_heads=True, key_heads=2),
        _case("weights-of-heads-64", (2, 5, 3, 128), 64, BF16, weights_of_heads=True, key_heads=2),
        # Batches, caches, strides.
        _case("batch", (2, 7, 3, 128), 128, BF16, "modes", key_heads=2, positions="int64", with_rstd=True),
        _case("batch-sequences", (3, 5, 2, 64), 64, BF16, cache="sequences", positions="int32", to_out=True),
        _case("batch-hf", (2, 6, 3, 64), 32, BF16, key_heads=1, cache="split-sequences", cache_dtype=BF16),
        _case("hf", (6, 3, 64), 64, BF16, cache="split", cache_dtype=BF16, interleaved=True),
        _case("rows-on-8-bytes", (5, 3, 64), 64, BF16, view=(4, 4)),
        _case("rows-on-2-bytes", (5, 3, 64), 48, BF16, "compile", view=(1, 6), key_heads=1),
        _case("rows-on-4-bytes", (5, 3, 64), 64, FP32, view=(1, 2)),
        _case("gaps", (2, 5, 3, 128), 128, BF16, view=(128, 128), to_out=True, key_heads=1, positions="shared"),
        # Positions outside, NaN and infinity, nothing.
        _case("special", (9, 3, 64), 64, special=True, positions="outside", key_heads=1),
        _case("special-48-of-64", (9, 3, 64), 48, special=True, positions="outside", to_out=True),
        _case("special", (9, 3, 64), 64, FP32, special=True, positions="outside"),
        _case("offset-past-the-cache", (5, 3, 64), 64, seqlen_offset=20),
        _case("offset-of-64-bits", (5, 3, 64), 32, seqlen_offset=2**32, positions="outside"),
        _case("no-tokens", (0, 3, 64), 64, key_heads=1, positions="int64", with_rstd=True),
        _case("no-sequences", (0, 4, 3, 64), 64, FP32, to_out=True, with_rstd=True),
        _case("no-heads-but-keys", (5, 0, 64), 64, key_heads=2, with_rstd=True),
        _case("no-cache", (5, 3, 64), 64, cache_rows=0),
        # Sizes of real models.
        *(
            Case(f"bf16-{rot}-of-{dim}-h{heads}-t{num_tokens}", make((num_tokens, heads, dim), rot, **options))
            for rot, dim, heads, options in (
                (128, 128, 64, {"key_heads": 8, "positions": "int64", "with_rstd": True}),
                (64, 256, 16, {"key_heads": 2, "positions": "int32", "weight_offset": 1.0}),
                (64, 64, 5, {"key_heads": 1, "interleaved": True, "round_before_weight": True}),
            )
            for num_tokens in (1, 64, 4001, 8001)
        ),
        Case("bf16-128-of-576-to-out-b3-t1333", make((3, 1333, 16, 576), 128, key_heads=3, to_out=True)),
        Case("fp32-128-of-128-h16-t4001", make((4001, 16, 128), 128, FP32, key_heads=2, with_rstd=True)),
        *(
            bench_case(
                f"bf16-128-h64-keys8-t{num_tokens}",
                make((num_tokens, 64, 128), 128, key_heads=8, cache_rows=num_tokens, positions="int64"),
                model_shape=num_tokens == 8192,
            )
            for num_tokens in (64, 8192)
        ),
        *(
            bench_case(f"bf16-{name}-t8192", make((8192, heads, dim), rot, cache_rows=8192, **options))
            for name, heads, dim, rot, options in (
                ("interleaved-128-h64-keys8", 64, 128, 128, {"key_heads": 8, "interleaved": True}),
                ("64-of-256-h16-keys2", 16, 256, 64, {"key_heads": 2}),
                ("128-h64-keys8-to-out", 64, 128, 128, {"key_heads": 8, "to_out": True, "with_rstd": True}),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

op = tk_quant.qk_norm_rotary
FORMS = {
    "both-channels-in-a-thread": make((50, 5, 128), 128, key_heads=2, positions="outside", with_rstd=True),
    "through-shared-memory": make((2, 33, 3, 72), 48, FP32, key_heads=2, round_before_weight=True, with_rstd=True),
    "interleaved": make((33, 3, 64), 64, interleaved=True, to_out=True, key_heads=1, weight_offset=1.0, with_rstd=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_is_the_norm_and_then_rope(form: str, device: str) -> None:
    kwargs = FORMS[form](device)
    found = transfer(kwargs)
    rstds = op(**found)
    of_norm = {name: kwargs[name] for name in ("weight_offset", "round_before_weight")}
    expected = [
        tk_quant.norm_forward(kwargs[name], kwargs[f"{name}_weight"], EPS, with_rstd=True, **of_norm)
        for name in ("query", "key")
    ]
    of_rope = {name: kwargs[name] for name in ("positions", "interleaved", "sin_cache")}
    tk_quant.apply_rotary(expected[0][0], kwargs["cos_sin_cache"], expected[1][0], **of_rope)
    for name, (normed, rstd, _), got in zip(("query", "key"), expected, rstds):
        out = "out" if name == "query" else "key_out"
        assert_equal(found[out] if kwargs[out] is not None else found[name], normed)
        assert_equal(got, rstd)


def test_by_hand(device: str) -> None:
    """Heads with mean squares of 4 and 16, a quarter turn at position 1."""
    cache = torch.zeros(2, 16, device=device)
    cache[0, :8], cache[1, 8:] = 1, 1
    x = torch.tensor([2.0] * 16 + [4.0, -4.0] * 4, device=device).reshape(1, 1, 24).repeat(2, 1, 1)
    x[..., 16:] = torch.tensor([2.0, -2.0] * 4)
    key = 2 * x
    weight = torch.arange(24.0, device=device)
    assert op(x, cache, weight, None, 0.0, key, weight_offset=1.0) is None
    assert x[0, 0].tolist() == [*range(1, 17), *(sign * (i + 1) for i, sign in zip(range(16, 24), [1, -1] * 4))]
    assert x[1, 0, :16].tolist() == [*range(-9, -17, -1), *range(1, 9)]
    assert_equal(x[1, :, 16:], x[0, :, 16:])
    # Without weight, the offset is added to 1.
    assert key[0, 0].tolist() == [2.0] * 16 + [2.0, -2.0] * 4
    assert key[1, 0].tolist() == [-2.0] * 8 + [2.0] * 8 + [2.0, -2.0] * 4


def test_one_launch() -> None:
    with capture(arch_from_name("sm_90a")) as captured:
        op(**make((5, 4, 64), 64, key_heads=1)("meta"))
    assert len(captured) == 1


X, KEY, CACHE = torch.ones(4, 3, 64), torch.ones(4, 2, 64), torch.ones(9, 64)
GOOD = {"query": X, "cos_sin_cache": CACHE, "query_weight": torch.ones(64), "key_weight": None, "eps": EPS, "key": KEY}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"query": torch.ones(4, 3, 68), "key": None}, ValueError, "query: .*multiple of 8 channels"),
        ({"cos_sin_cache": torch.ones(9, 72)}, ValueError, "cos_sin_cache: expected cos and sin for at most 64"),
        ({"query_weight": torch.ones(2, 64)}, ValueError, "query_weight: .*shape"),
        ({"query_weight": torch.ones(64).bfloat16()}, TypeError, "query_weight: .*float32"),
        ({"key_weight": torch.ones(3, 64)}, ValueError, "key_weight: .*shape"),
        ({"key_weight": torch.ones(64), "key": None}, ValueError, "key_weight: expected None without key"),
        ({"eps": -1e-6}, ValueError, "eps: .*at least 0"),
        ({"out": X.clone()}, ValueError, "key_out: expected a tensor beside key and out"),
        ({"out": X.clone(), "key_out": KEY.clone(), "key": None}, ValueError, "key_out: expected None without key"),
        ({"key_out": KEY.clone()}, TypeError, "out: expected a torch.Tensor, got NoneType"),
        ({"out": torch.ones(4, 3, 32), "key_out": KEY.clone()}, ValueError, r"out: expected shape \(4, 3, 64\)"),
        ({"out": X, "key_out": KEY.clone()}, ValueError, "out: expected memory of its own, got some of query"),
        ({"query": torch.ones(1, 3, 64).expand(4, 3, 64)}, ValueError, "query: expected elements apart in memory"),
    ],
)
