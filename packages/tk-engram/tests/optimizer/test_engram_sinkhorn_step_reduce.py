"""engram_sinkhorn_step_reduce."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, tiers


def make(num_partials: int, width: int, *, first_element: int = 0) -> Make:
    """Sums of squares from 0 to 1; the output is filled with NaN.

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        partials = torch.rand(first_element + num_partials * width, device=device)
        sums = torch.full((first_element + width,), torch.nan, device=device)
        return {
            "col_sumsq_partial": partials[first_element:].view(num_partials, width),
            "col_sumsq": sums[first_element:],
        }

    return build


SPEC = OpSpec(
    op=tk_engram.engram_sinkhorn_step_reduce,
    mutates=("col_sumsq",),
    cases=(
        # Fewer partials than are in flight, and more; columns of one thread block, and some of a second.
        Case("p3-d32", make(3, 32), small=True, modes=True),
        Case("p67-d33", make(67, 33), small=True, modes=True),
        Case("p133-d1", make(133, 1), small=True),
        Case("p0-d40", make(0, 40), small=True),
        Case("p5-d31-unaligned", make(5, 31, first_element=1), small=True),
        Case("p396-d576", make(396, 576)),
        Case("p1001-d8192", make(1001, 8192)),
        Case("p396-d16384", make(396, 16384)),
        Case("p396-d256-bench", make(396, 256), bench=True, model_shape=True, gpu=False, compile=True),
        Case("p396-d1024-bench", make(396, 1024), bench=True, gpu=False),
        Case("p396-d4096-bench", make(396, 4096), bench=True, gpu=False),
    ),
)


test_tiers = tiers.tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device: str) -> None:
    sums = torch.full((2,), 9.0, device=device)
    partial = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], device=device)
    assert tk_engram.engram_sinkhorn_step_reduce(partial, sums) is None
    assert sums.tolist() == [7.0, 70.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [60, 200])
def test_partials_ascend(count: int, device: str) -> None:
    # Each 2⁻²⁴ after the 1 is lost, one by one; those before it are not.
    tiny = torch.full((count, 1), 2.0**-24, device=device)
    one = torch.ones(1, 1, device=device)
    sums = torch.empty(1, device=device)
    tk_engram.engram_sinkhorn_step_reduce(torch.cat((one, tiny)), sums)
    assert sums.item() == 1.0
    tk_engram.engram_sinkhorn_step_reduce(torch.cat((tiny, one)), sums)
    assert sums.item() == 1.0 + count * 2.0**-24


@pytest.mark.parametrize("device", DEVICES)
def test_against_a_sum_in_float64(device: str) -> None:
    inputs = make(396, 100)(device)
    tk_engram.engram_sinkhorn_step_reduce(**inputs)
    expected = inputs["col_sumsq_partial"].double().sum(0)
    torch.testing.assert_close(inputs["col_sumsq"].double(), expected, rtol=1e-5, atol=0)


def test_no_partials_are_zero() -> None:
    sums = torch.full((5,), torch.nan)
    tk_engram.engram_sinkhorn_step_reduce(torch.empty(0, 5), sums)
    assert sums.tolist() == [0.0] * 5


GOOD: dict[str, Any] = {"col_sumsq_partial": torch.ones(3, 4), "col_sumsq": torch.full((4,), 7.0)}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"col_sumsq_partial": torch.ones(3, 0)}, ValueError, "D .*col_sumsq_partial.*1 to 16384"),
        ({"col_sumsq": torch.ones(3)}, ValueError, "col_sumsq: .*shape"),
    ],
)
