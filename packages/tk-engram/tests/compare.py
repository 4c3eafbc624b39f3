"""Comparison of results that may differ in their last bit from the reference's."""

import torch
from torch import Tensor

from tk_core.testing.numeric import assert_same_metadata, calc_diff

MANY_ELEMENTS = 4_000_000
"""From this many elements on, single roundings do not matter in a sum over all."""


def assert_calc_diff(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    """Raise AssertionError unless metadata are equal and calc_diff is less than `bound`."""
    assert_same_metadata(actual, expected, name)
    difference = calc_diff(actual, expected)
    assert difference < bound, f"{name}: expected a calc_diff below {bound}, got {difference:.3g}"


def assert_within_a_step(actual: Tensor, expected: Tensor, name: str, near: float | None = None) -> None:
    """Raise AssertionError unless each bfloat16 is the expected one, a neighbour of it, or within `near` of it.

    `near` is by default 1e-6 of the largest magnitude: results of that size are differences of rounded terms.
    """
    assert_same_metadata(actual, expected, name)
    if not actual.numel():
        return
    got, want = actual.float(), expected.float()
    near = 1e-6 * float(want.abs().max()) if near is None else near
    # A bfloat16 in [2^e, 2^(e + 1)) has a unit of 2^(e - 7); frexp gives e + 1.
    unit = torch.ones_like(want).ldexp(got.abs().maximum(want.abs()).frexp().exponent - 8)
    # A NaN is not at most a unit.
    wrong = ~((got - want).abs() <= unit.clamp_min(near))
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are more than one unit in the last place off, "
        f"got {got[wrong][0].item()}, expected {want[wrong][0].item()}"
    )


def assert_close_bfloat16(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    """calc_diff from `MANY_ELEMENTS` on; below, each element within a unit in its last place or 1e-6."""
    if expected.numel() >= MANY_ELEMENTS:
        assert_calc_diff(actual, expected, bound, name)
    else:
        assert_within_a_step(actual, expected, name, near=1e-6)
