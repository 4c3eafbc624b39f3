"""Comparison of results of inexact ops with the reference's."""

from typing import Any

import torch

from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import tensors


def within(rtol: float | None = None, atol: float | None = None) -> Any:
    """compare(actual, expected) for trees by torch.testing.assert_close, by default with its tolerances by dtype."""

    def compare(actual: Any, expected: Any) -> None:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        for index, (x, y) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
            assert_same_metadata(x, y, f"tensor {index}")

    return compare


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; 0 for two tensors of zeros, or of no elements."""
    difference = float((actual.double() - expected.double()).norm())
    size = float(expected.double().norm())
    return difference / size if size else difference


def assert_relative_error(actual: torch.Tensor, expected: torch.Tensor, bound: float, name: str = "result") -> None:
    """Raise AssertionError unless shapes agree and ‖actual - expected‖ ≤ bound · ‖expected‖, without a NaN."""
    assert actual.shape == expected.shape, f"{name}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    error = relative_error(actual, expected)
    assert error <= bound, f"{name}: expected a relative error of at most {bound}, got {error:.3g}"
