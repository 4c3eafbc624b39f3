"""How far a product may be from its reference: the tensor core drops bits, and sums in another order."""

from typing import Any

import torch

from tk_core.reference.scales import unpack_scales
from tk_core.testing.numeric import assert_same_metadata, calc_diff
from tk_core.testing.trees import tensors

from .inputs import dequantized

_LIMITS = {torch.float32: 1e-7, torch.bfloat16: 3e-6}


def assert_close(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless results have calc_diff below 1e-7 (float32) or 3e-6 (bfloat16)."""
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        assert_same_metadata(got, want, "d")
        diff = calc_diff(got, want)
        assert diff < _LIMITS[want.dtype], f"d: expected a difference below {_LIMITS[want.dtype]}, got {diff:.3g}"


def assert_close_pairs(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise AssertionError unless e4m3 pairs stand for values with calc_diff below 1e-4, factors within 0.5 %.

    A product that is off in its last bits may round to the next code, 6 to 12 % away; few are that close to the middle.
    Of 65,536 factors on an H200 one was 0.11 % off: that of a row whose sums nearly cancel. At most one of 1,000 packed
    factors may differ, where the last bits of amax decide between two powers of two.
    """
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_same_metadata(got, want, ("data", "sf")[index])
    is_packed = expected[1].dtype is torch.int32
    num_rows, num_cols = expected[0].shape
    actual, expected = ((data, unpack_scales(sf, num_rows, num_cols // 128)) for data, sf in (actual, expected))
    if is_packed:
        num_others = int((actual[1] != expected[1]).sum())
        assert num_others * 1000 <= expected[1].numel(), f"sf: {num_others} of {expected[1].numel()} differ"
    else:
        torch.testing.assert_close(actual[1], expected[1], rtol=5e-3, atol=0)
    diff = calc_diff(dequantized(actual), dequantized(expected))
    assert diff < 1e-4, f"data: expected a difference below 1e-4, got {diff:.3g}"
