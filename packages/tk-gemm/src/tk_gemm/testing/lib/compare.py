"""How far a product may be from its reference: they sum in other orders."""

from typing import Any

import torch

from tk_core.testing.numeric import assert_same_metadata, calc_diff
from tk_core.testing.trees import tensors

_LIMITS = {torch.float32: 1e-7, torch.bfloat16: 3e-6}


def assert_close(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless results have calc_diff below 1e-7 (float32) or 3e-6 (bfloat16)."""
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        assert_same_metadata(got, want, "d")
        diff = calc_diff(got, want)
        assert diff < _LIMITS[want.dtype], f"d: expected a difference below {_LIMITS[want.dtype]}, got {diff:.3g}"
