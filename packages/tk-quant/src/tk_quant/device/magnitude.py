"""The larger of two magnitudes, in which NaN stays, in one or two instructions."""

from typing import Any

from tk_core.headers import Header

_MAGNITUDE = Header(__file__)


def larger_magnitude_bf16x2(a: Any, x: Any) -> Any:
    """The larger of a and |x| in both halves, bfloat16 pairs in uint32; NaN, of bits 0x7fff, where either is."""
    return _MAGNITUDE.call("uint32", "tk_larger_magnitude_bf16x2", a, x)


def larger_magnitude_f32(a: Any, x: Any) -> Any:
    """The larger of a and |x|, the bits of float32; NaN has the bits 0x7fffffff."""
    return _MAGNITUDE.call("uint32", "tk_larger_magnitude_f32", a, x)
