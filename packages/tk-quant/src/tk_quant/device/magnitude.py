"""The larger of two magnitudes, propagating NaN, in one or two instructions."""

from typing import Any

from tk_core.headers import Header

_MAGNITUDE = Header(__file__)


def larger_magnitude_bf16x2(a: Any, x: Any) -> Any:
    """max(a, |x|) of bfloat16 pairs in uint32, in each half; NaN, with the bits 0x7fff, if either is NaN."""
    return _MAGNITUDE.call("uint32", "tk_larger_magnitude_bf16x2", a, x)


def larger_magnitude_f32(a: Any, x: Any) -> Any:
    """max(a, |x|) of float32, as their bits; NaN, with the bits 0x7fffffff, if either is NaN."""
    return _MAGNITUDE.call("uint32", "tk_larger_magnitude_f32", a, x)
