"""Elements times a scale to e2m1 codes, and those scales, in few instructions where no instruction casts to FP4.

`x` is four uint32 of bfloat16 pairs, or the address of more. Unless stated otherwise, products must be finite and below
7 in magnitude, as they are if the scale was made from the amax of the block. See fp4.py for how codes are found.
"""

from collections.abc import Sequence
from typing import Any

from tk_core.headers import Header

_SCALED_FP4 = Header(__file__)


def e2m1x8_by_power(x: Sequence[Any], first: Any, second: Any) -> Any:
    """Codes of eight bfloat16, four times a power of two and four times another, in a uint32.

    Each power is given as a uint32 that holds it twice as bfloat16.
    """
    return _SCALED_FP4.call("uint32", "tk_e2m1x8_by_power", *x, first, second)


def e2m1x8_by_float(x: Sequence[Any], first: Any, second: Any) -> Any:
    """Codes of eight bfloat16, four times a float32 and four times another, in a uint32."""
    return _SCALED_FP4.call("uint32", "tk_e2m1x8_by_float", *x, first, second)


def e2m1_by_sf(num_words: int, x: Any, sf_bits: Any, codes: Any) -> Any:
    """Store the codes of 8 * num_words bfloat16 times 1 / sf at a uint32 address; they saturate, NaN becomes +6."""
    return _SCALED_FP4.call("void", f"tk_e2m1_by_sf<{num_words}>", x, sf_bits, codes)


def e2m1x8_of_e4m3(first: Any, second: Any, halves: Any, scale: Any) -> Any:
    """Codes of eight e4m3 codes times a float32 power of two, in a uint32.

    The codes are in two uint32, and as eight float16 at the address `halves`.
    """
    return _SCALED_FP4.call("uint32", "tk_e2m1x8_of_e4m3", first, second, halves, scale)


def e2m1_scale_of_amax(amax_bits: Any, scale: Any) -> Any:
    """From the bits of an amax of at least 6 * 2**-126, store those of sf and of what x is multiplied by.

    `scale` is the address of two uint32. sf is NaN or infinite where amax is.
    """
    return _SCALED_FP4.call("void", "tk_e2m1_scale_of_amax", amax_bits, scale)


def nvfp4_scale_of_amax(amax_bits: Any, tensor_sf: Any, scale: Any) -> Any:
    """From the bits of an amax of bfloat16, store sf in e4m3 and the bits of sf * tensor_sf at an address of uint32."""
    return _SCALED_FP4.call("void", "tk_nvfp4_scale_of_amax", amax_bits, tensor_sf, scale)
