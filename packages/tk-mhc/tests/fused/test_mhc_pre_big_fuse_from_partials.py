"""mhc_pre_big_fuse_from_partials."""

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference

from ..projection.test_mhc_prenorm_gemm import split_cases
from . import test_mhc_pre_big_fuse as big_fuse
from .test_mhc_pre_big_fuse import MODEL_EPS, assert_close_input


def make(
    leading: int | tuple[int, ...], mhc_mult: int = 4, hidden: int = 7168, n_splits: int = 16, **options: Any
) -> Make:
    """What mhc_pre_big_fuse takes, but for fn the reference's partial sums."""
    make_all = big_fuse.make(leading, mhc_mult, hidden, n_splits=n_splits, norm_weight=False, **options)

    def build(device: str) -> dict[str, Any]:
        inputs = make_all(device)
        del inputs["norm_weight"]
        mul, sqrsum = reference.mhc_prenorm_gemm(inputs["residual"], inputs.pop("fn"), inputs.pop("n_splits"))
        return {"gemm_out_mul": mul, "gemm_out_sqrsum": sqrsum, **inputs}

    return build


def compare(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Both add the same float32 numbers in the same order, so only rsqrt, exp and sums of few numbers differ.

    They change weights by about 1e-6; the sum of rounding errors of ten Sinkhorn iterations stays below 1e-5.
    """
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    for name, x, y in zip(("post", "comb", "layer_input", "next_pre_mix"), actual, expected):
        if name == "layer_input":
            assert_close_input(x, y, atol=1e-4)
        else:
            assert_same_metadata(x, y, name)
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=tk_mhc.mhc_pre_big_fuse_from_partials,
    compare=compare,
    cases=(
        Case("m4-h64-t3-splits2", make(3, 4, 64, 2), small=True, modes=True),
        Case("m2-h64-t17-splits1", make(17, 2, 64, 1), small=True),
        Case("m8-h64-t3-splits3", make(3, 8, 64, 3), small=True, compile=True),
        # Empty splits.
        Case("m4-h64-t3-splits7", make(3, 4, 64, 7), small=True),
        Case("m2-h576-t3-splits16", make(3, 2, 576), small=True),
        Case("m4-h128-t3-splits4-layer-norm-bf16", make(3, 4, 128, 4, layer_norm=_BF16), small=True, modes=True),
        Case("m4-h576-t1-splits4-layer-norm-float32", make(1, 4, 576, 4, layer_norm=_FLOAT32), small=True),
        Case("m4-h64-t17-splits2-shifted", make(17, 4, 64, 2, shifted=True), small=True, modes=True),
        Case(
            "m4-h128-t3-splits2-shifted-stream0",
            make(3, 4, 128, 2, shifted=True, pre_mix=False),
            small=True,
        ),
        Case(
            "m4-h192-t3-splits2-shifted-layer-norm",
            make(3, 4, 192, 2, layer_norm=_BF16, shifted=True),
            small=True,
        ),
        Case("m4-h64-no-leading-splits2", make((), 4, 64, 2), small=True),
        Case("m4-h64-t2x3-splits2-shifted", make((2, 3), 4, 64, 2, shifted=True), small=True),
        Case("m4-h64-t0-splits2", make(0, 4, 64, 2), small=True),
        Case(
            "m4-h64-t2x0-splits2-shifted-layer-norm",
            make((2, 0), 4, 64, 2, layer_norm=_BF16, shifted=True),
            small=True,
        ),
        *split_cases(make, compiled=False, eps=MODEL_EPS),
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 16, 500)),
        *(Case(f"m4-h7168-t{t}-splits16-layer-norm", make(t, layer_norm=_BF16)) for t in (64, 8192)),
        *(Case(f"m4-h7168-t{t}-splits16-shifted", make(t, shifted=True)) for t in (64, 8192)),
        Case("m4-h7168-t64-splits16-scale1", make(64, scale=1.0)),
        *(
            bench_case(f"m4-h7168-t8192-splits1-{name}", make(8192, n_splits=1, eps=MODEL_EPS, **options))
            for name, options in (("layer-norm", {"layer_norm": _BF16}), ("shifted", {"shifted": True}))
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    # Two splits: Σx² = 128 + 384 = 512 of 128 channels, a mean of 4, rstd 1/2. Mixes: (3 + 1)/2 = 2 and (1 - 5)/2 = -2.
    mul = torch.zeros(2, 1, 8, device=device)
    mul[:, 0, 0] = torch.tensor([3.0, 1.0])
    mul[:, 0, 3] = torch.tensor([1.0, -5.0])
    arguments = {
        "gemm_out_mul": mul,
        "gemm_out_sqrsum": torch.tensor([[128.0], [384.0]], device=device),
        "mhc_scale": torch.tensor([0.5 * log(3), log(3), 1.0], device=device),
        "mhc_base": torch.tensor([0.0, log(3), log(3), 0.0, 0.0, log(3), 0.0, log(3)], device=device),
        # Not what the partial sums come from: they alone count for the mixes.
        "residual": torch.tensor([3.0, 5.0], dtype=torch.bfloat16, device=device)[:, None].repeat(1, 64),
        "rms_eps": 0.0,
        "mhc_pre_eps": 0.25,
        "mhc_sinkhorn_eps": 0.0,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 1,
    }
    post, comb, layer_input = tk_mhc.mhc_pre_big_fuse_from_partials(**arguments)
    # z of pre: (log(3), log(3)); of post: (log(3), -2·log(3)).
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.5], [0.2]]))
    torch.testing.assert_close(comb.cpu(), torch.full((2, 2), 0.5))
    torch.testing.assert_close(layer_input.cpu(), torch.full((64,), 8.0, dtype=torch.bfloat16))

    # An eps of 12 halves rstd: z of pre (log(3)/2, log(3)), of which the sigmoids are √3/(1 + √3) and 3/4.
    pre_mix = torch.tensor([[2.0], [-1.0]], device=device)
    _, _, layer_input, next_pre_mix = tk_mhc.mhc_pre_big_fuse_from_partials(
        **{**arguments, "rms_eps": 12.0}, shifted=True, pre_mix=pre_mix
    )
    torch.testing.assert_close(next_pre_mix.cpu(), torch.tensor([[3**0.5 / (1 + 3**0.5) + 0.25], [1.0]]))
    assert layer_input.tolist() == [1.0] * 64


@pytest.mark.parametrize("n_splits", [1, 3, 9])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_references_agree_in_float64(mhc_mult: int, n_splits: int) -> None:
    inputs = {
        name: value.double() if isinstance(value, Tensor) else value
        for name, value in big_fuse.make(5, mhc_mult, 64, layer_norm=torch.float32)("cpu").items()
    }
    expected = reference.mhc_pre_big_fuse(**inputs)
    inputs.pop("n_splits")
    fn = inputs.pop("fn") * inputs.pop("norm_weight")
    partials = reference.mhc_prenorm_gemm(inputs["residual"], fn, n_splits)
    torch.testing.assert_close(reference.mhc_pre_big_fuse_from_partials(*partials, **inputs), expected)


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64, 2)("cpu"),
    [
        # Of two shapes that do not fit each other, either argument may be the one that is named.
        ({"gemm_out_mul": torch.ones(2, 4, 24)}, ValueError, "gemm_out_mul|residual"),
        ({"gemm_out_mul": torch.ones(0, 3, 24), "gemm_out_sqrsum": torch.ones(0, 3)}, ValueError, "gemm_out_mul"),
        ({"gemm_out_sqrsum": torch.ones(3, 3)}, ValueError, "gemm_out_sqrsum: .*shape"),
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
    ],
)


@pytest.mark.gpu(gib=2)
@pytest.mark.parametrize("norm_weight", [False, True])
@pytest.mark.parametrize("n_splits", [1, 7])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"),
    [
        *((2, 576, 17), (2, 8192, 64), (4, 64, 300), (4, 192, 1)),
        *((4, 7168, num_tokens) for num_tokens in (1, 17, 64, 300, 8192)),
        *((8, 128, 17), (8, 8192, 300)),
    ],
)
def test_gpu_after_the_gemm_it_is_mhc_pre_big_fuse(
    mhc_mult: int, hidden: int, num_tokens: int, n_splits: int, norm_weight: bool
) -> None:
    for options in ({}, {"shifted": True, "layer_norm": torch.bfloat16}):
        inputs = big_fuse.make(num_tokens, mhc_mult, hidden, n_splits=n_splits, norm_weight=norm_weight, **options)(
            "cuda"
        )
        expected = tk_mhc.mhc_pre_big_fuse(**inputs)
        fn, weight = inputs.pop("fn"), inputs.pop("norm_weight")
        weighted = fn if weight is None else fn * weight
        partials = tk_mhc.mhc_prenorm_gemm(inputs["residual"], weighted, inputs.pop("n_splits"))
        assert_equal(tk_mhc.mhc_pre_big_fuse_from_partials(*partials, **inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 65, 1000])
def test_gpu_empty_splits_change_nothing(num_tokens: int) -> None:
    inputs = big_fuse.make(num_tokens, 4, 192, n_splits=12, norm_weight=False)("cuda")
    expected = tk_mhc.mhc_pre_big_fuse(**inputs)
    fn, *_ = inputs.pop("fn"), inputs.pop("norm_weight"), inputs.pop("n_splits")
    for n_splits in (12, 13, 40):
        partials = tk_mhc.mhc_prenorm_gemm(inputs["residual"], fn, n_splits)
        assert_equal(tk_mhc.mhc_pre_big_fuse_from_partials(*partials, **inputs), expected)
