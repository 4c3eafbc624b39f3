"""mhc_pre_split_mixes_bwd."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import Make, OpSpec, assert_equal, empty, tiers
from tk_mhc import reference

from ..compare import within
from ..inputs import mix_cases
from .test_mhc_pre_split_mixes import cases_without_comb, make_mixes


def make(
    leading: tuple[int, ...], mhc_mult: int, *, first_element: int = 0, std: float = 1.0, has_comb: bool = True
) -> Make:
    """Arguments of the op: normal gradients, which start at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        def draw(*shape: int) -> torch.Tensor:
            return empty(*shape, device=device, first_element=first_element).normal_()

        return {
            "d_pre": draw(*leading, mhc_mult, 1),
            "d_post": draw(*leading, mhc_mult, 1),
            "d_comb": draw(*leading, mhc_mult, mhc_mult) if has_comb else None,
            **make_mixes(leading, mhc_mult, device, first_element=first_element, std=std, has_comb=has_comb),
            "mhc_post_mult_value": 2.0,
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_split_mixes_bwd,
    compare=within(rtol=1e-5, atol=2e-5),
    # Several tiles per range, empty ranges at the end, and a partial tile.
    cases=(*mix_cases(make, 10.0, 67, ((4, 20001), (2, 40001), (8, 4001))), *cases_without_comb(make)),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # Where z = 0 the slope of sigmoid is 1/4; the second token's z of log 3 has 3/4 · 1/4.
    log3 = math.log(3.0)
    d_pre = torch.tensor([[[4.0], [8.0]], [[16.0], [0.0]]])
    d_post = torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]]])
    d_comb = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    mixes = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [log3, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]])
    d_mixes, d_scale, d_base = tk_mhc.mhc_pre_split_mixes_bwd(
        d_pre, d_post, d_comb, mixes, torch.tensor([1.0, 3.0, 10.0]), torch.zeros(8), 2, 2.0
    )
    expected = [[1.0, 2.0, 1.5, 3.0, 10.0, 20.0, 30.0, 40.0], [3.0, 0.0, 0.0, 0.0, 50.0, 60.0, 70.0, 80.0]]
    torch.testing.assert_close(d_mixes, torch.tensor(expected))
    torch.testing.assert_close(d_scale, torch.tensor([3.0 * log3, 0.0, 20.0]))
    torch.testing.assert_close(d_base, torch.tensor([4.0, 2.0, 0.5, 1.0, 6.0, 8.0, 10.0, 12.0]))
    without = tk_mhc.mhc_pre_split_mixes_bwd(
        d_pre, d_post, None, mixes[:, :4].clone(), torch.tensor([1.0, 3.0]), torch.zeros(4), 2, 2.0
    )
    assert_equal(without, (d_mixes[:, :4].clone(), d_scale[:2], d_base[:4]))


def autograd(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The gradients of the forward's reference, in another dtype."""
    leaves = [inputs[name].to(dtype).requires_grad_() for name in ("input_mixes", "mhc_scale", "mhc_base")]
    numbers = inputs["mhc_mult"], inputs["mhc_post_mult_value"], 1e-2
    results = reference.mhc_pre_split_mixes(*leaves, *numbers, mhc_post_eps=1e-2)
    grads = [inputs[name].to(dtype) for name in ("d_pre", "d_post", "d_comb") if inputs[name] is not None]
    return torch.autograd.grad(results[: len(grads)], leaves, grads)


@pytest.mark.parametrize("has_comb", [True, False])
@pytest.mark.parametrize("leading", [(100,), (2, 3), ()])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_autograd(
    dtype: torch.dtype, tolerance: float, mhc_mult: int, leading: tuple[int, ...], has_comb: bool
) -> None:
    inputs = make(leading, mhc_mult, has_comb=has_comb)("cpu")
    function = tk_mhc.mhc_pre_split_mixes_bwd if dtype == torch.float32 else reference.mhc_pre_split_mixes_bwd
    given = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for actual, expected in zip(function(**given), autograd(inputs, dtype), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2 * tolerance)


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 2)("cpu"),
    [
        ({"d_pre": torch.ones(3, 2)}, ValueError, "d_pre.*shape"),
        ({"d_pre": torch.ones(2, 3, 1).transpose(0, 1)}, ValueError, "d_pre.*contiguous"),
        ({"d_post": torch.ones(4, 2, 1)}, ValueError, "d_post.*shape"),
        ({"d_post": torch.ones(()).expand(3, 2, 1)}, ValueError, "d_post.*contiguous"),
        ({"d_comb": torch.ones(3, 4)}, ValueError, "d_comb.*shape"),
        (
            {"input_mixes": torch.ones(3, 24)},
            ValueError,
            "columns of input_mixes: expected 8, or 4 without comb, got 24",
        ),
        ({"d_comb": None}, TypeError, "d_comb: expected a torch.Tensor, got NoneType"),
        (
            {"input_mixes": torch.ones(3, 4), "mhc_scale": torch.ones(2), "mhc_base": torch.ones(4)},
            ValueError,
            "d_comb: expected None, as the mixes have no comb",
        ),
        ({"mhc_mult": 5}, ValueError, "mhc_mult.*2, 4, 8"),
        ({"mhc_post_mult_value": math.inf}, ValueError, "mhc_post_mult_value.*finite"),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("has_comb", [True, False])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_gpu_against_autograd_in_float64(mhc_mult: int, has_comb: bool) -> None:
    inputs = make((8192,), mhc_mult, has_comb=has_comb)("cuda")
    for actual, expected in zip(tk_mhc.mhc_pre_split_mixes_bwd(**inputs), autograd(inputs, torch.float64), strict=True):
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=2e-5)
