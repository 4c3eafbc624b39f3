"""mhc_head_compute_mix_bwd."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import Make, OpSpec, empty, tiers
from tk_mhc import reference

from ..compare import within
from ..inputs import mix_cases
from .test_mhc_head_compute_mix import make_head


def make(leading: tuple[int, ...], mhc_mult: int, *, first_element: int = 0, std: float = 1.0) -> Make:
    """Arguments of the op: a normal gradient, which starts at element `first_element` of its storage."""

    def build(device: str) -> dict[str, Any]:
        d_o = empty(*leading, mhc_mult, device=device, first_element=first_element).normal_()
        return {"d_o": d_o, **make_head(leading, mhc_mult, device, first_element=first_element, std=std)}

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_head_compute_mix_bwd,
    compare=within(rtol=1e-4, atol=1e-5),
    # Several tiles per range, empty ranges at the end, and a partial tile.
    cases=mix_cases(make, 10.0, 167, ((4, 40001), (2, 4001), (8, 20001))),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # The slope of sigmoid is 1/4 where z = 0, 3/16 where z = log 3.
    log3 = math.log(3.0)
    d_o = torch.tensor([[4.0, 16.0], [8.0, 0.0]])
    mix = torch.tensor([[0.0, log3 / 2], [0.0, 1.0]])
    d_mix, d_scale, d_base = tk_mhc.mhc_head_compute_mix_bwd(d_o, mix, torch.tensor([2.0]), torch.zeros(2))
    torch.testing.assert_close(d_mix, torch.tensor([[2.0, 6.0], [4.0, 0.0]]))
    torch.testing.assert_close(d_scale, torch.tensor([1.5 * log3]))
    torch.testing.assert_close(d_base, torch.tensor([3.0, 3.0]))


def autograd(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The gradients of the forward's reference, in another dtype."""
    leaves = [inputs[name].to(dtype).requires_grad_() for name in ("input_mix", "mhc_scale", "mhc_base")]
    return torch.autograd.grad(reference.mhc_head_compute_mix(*leaves, 1e-2), leaves, inputs["d_o"].to(dtype))


@pytest.mark.parametrize("leading", [(100,), (2, 3), ()])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-4, 1e-5)])
def test_against_autograd(
    dtype: torch.dtype, rtol: float, atol: float, mhc_mult: int, leading: tuple[int, ...]
) -> None:
    inputs = make(leading, mhc_mult)("cpu")
    function = tk_mhc.mhc_head_compute_mix_bwd if dtype == torch.float32 else reference.mhc_head_compute_mix_bwd
    results = function(**{name: x.to(dtype) for name, x in inputs.items()})
    for actual, expected in zip(results, autograd(inputs, dtype), strict=True):
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 4)("cpu"),
    [
        ({"d_o": torch.ones(3, 4, 1)}, ValueError, "d_o.*shape"),
        ({"input_mix": torch.ones(3, 3)}, ValueError, "mhc_mult.*2, 4, 8"),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_gpu_against_autograd_in_float64(mhc_mult: int) -> None:
    inputs = make((8192,), mhc_mult)("cuda")
    for actual, expected in zip(
        tk_mhc.mhc_head_compute_mix_bwd(**inputs), autograd(inputs, torch.float64), strict=True
    ):
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)
