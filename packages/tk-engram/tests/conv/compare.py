"""Comparison of rounded results of the convolution with the reference's."""

import torch
from torch import Tensor

from tk_core.testing.numeric import assert_same_metadata


def assert_within_a_step(actual: Tensor, expected: Tensor, name: str) -> None:
    """Raise AssertionError unless each element is the expected bfloat16, a neighbour of it, or close to it.

    Close is within 1e-6 of the largest magnitude: results of that size are differences of rounded terms.
    """
    assert_same_metadata(actual, expected, name)
    if not actual.numel():
        return
    assert actual.isfinite().all(), f"{name}: expected finite values"
    distance = (actual.float() - expected.float()).abs()
    magnitude = torch.maximum(actual.abs(), expected.abs()).float()
    # A bfloat16 has 7 bits of mantissa after the leading one.
    step = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=1e-30))) - 7)
    near = 1e-6 * float(expected.abs().max())
    worst = float((distance - step.clamp(min=near)).max())
    assert worst <= 0, f"{name}: expected within a step of bfloat16 or {near:.3g}, off by {worst:.3g} more"
