"""mhc_post_bwd."""

from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_mhc import reference

from ..compare import within
from .test_mhc_post import draw_mixes, draw_streams, draw_with_extremes, shared_cases


def compare(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """d_x and d_residual bit for bit, d_post and d_comb, if any, within 1e-4: they are added in another order."""
    assert_equal(actual[:2], expected[:2], name="d_x, d_residual")
    within(rtol=1e-4, atol=1e-4)(actual[2:], expected[2:])


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, *, strided: bool = False, has_comb: bool = True) -> Make:
    """Normal values and mixes like those of a model; `strided`: residual and d_o are not contiguous."""

    def build(device: str) -> dict[str, Any]:
        post, comb = draw_mixes(leading, mhc_mult, device)
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": draw_streams(leading, mhc_mult, hidden, device, strided),
            "post_layer_mix": post,
            "comb_res_mix": comb if has_comb else None,
            "d_o": draw_streams(leading, mhc_mult, hidden, device, strided),
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_post_bwd,
    compare=compare,
    cases=(
        # One warp per token and several, rounds with and without idle threads; all numbers of streams.
        *shared_cases(make),
        Case("m2-h512-t3", make((3,), 2, 512), small=True),
        Case("m8-h576-t17", make((17,), 8, 576)),
        Case("m8-h7168-t17", make((17,), 8, 7168), compile=True),
        Case("m2-h7168-t17", make((17,), 2, 7168)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    residual = torch.tensor([1.0, 10.0]).bfloat16()[:, None].repeat(1, 64)
    x = torch.full((64,), 3.0).bfloat16()
    post = torch.tensor([[1.0], [0.5]])
    comb = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    d_o = torch.tensor([2.0, 8.0]).bfloat16()[:, None].repeat(1, 64)
    d_x, d_residual, d_post, d_comb = tk_mhc.mhc_post_bwd(x, residual, post, comb, d_o)
    assert d_x[7].item() == 1 * 2 + 0.5 * 8
    assert d_residual[:, 7].tolist() == [1 * 2 + 2 * 8, 3 * 2 + 4 * 8]
    assert d_post.tolist() == [[64 * 3 * 2], [64 * 3 * 8]]
    assert d_comb.tolist() == [[64 * 1 * 2, 64 * 1 * 8], [64 * 10 * 2, 64 * 10 * 8]]


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_without_comb_it_has_the_bits_of_the_identity(mhc_mult: int, device: str) -> None:
    inputs, identity = draw_with_extremes(mhc_mult, device)
    inputs["d_o"] = inputs["residual"].flip(0)
    *expected, _ = tk_mhc.mhc_post_bwd(**inputs, comb_res_mix=identity)
    *actual, d_comb = tk_mhc.mhc_post_bwd(**inputs, comb_res_mix=None)
    assert d_comb is None
    assert_equal(actual, expected)


def gradients(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Those that autograd finds through the forward's reference, in this dtype."""
    leaves = [x.to(dtype).requires_grad_() for name, x in inputs.items() if name != "d_o"]
    return torch.autograd.grad(reference.mhc_post(*leaves), leaves, inputs["d_o"].to(dtype))


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_reference_against_autograd(dtype: torch.dtype, tolerance: float, mhc_mult: int) -> None:
    inputs = make((2, 3), mhc_mult, 64)("cpu")
    actual = reference.mhc_post_bwd(**{name: x.to(dtype) for name, x in inputs.items()})
    torch.testing.assert_close(actual, gradients(inputs, dtype), rtol=tolerance, atol=tolerance)


def test_against_autograd_in_float64(device: str) -> None:
    inputs = make((17,), 4, 576)(device)
    d_x, d_residual, d_post, d_comb = tk_mhc.mhc_post_bwd(**inputs)
    expected = gradients(inputs, torch.float64)
    torch.testing.assert_close((d_x, d_residual), tuple(x.bfloat16() for x in expected[:2]))
    torch.testing.assert_close((d_post, d_comb), tuple(x.float() for x in expected[2:]), rtol=1e-4, atol=1e-4)


GOOD = make((5,), 4, 64)("cpu")


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": GOOD["x"][:4]}, ValueError, "x: .*shape"),
        ({"residual": GOOD["residual"][:, :3]}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"d_o": GOOD["d_o"][:4]}, ValueError, "d_o: .*shape"),
    ],
)
