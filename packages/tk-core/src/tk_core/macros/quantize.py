"""Quantization in registers: scale factors from the amax of a block, and e4m3 and e2m1 codes of a thread's values.

`sf` is a scale factor, `factor` what x is multiplied by, about 1 / sf.
"""

from math import frexp
from typing import Any

import tilelang.language as T

from tk_core.device.e2m1 import encode_e2m1x8
from tk_core.scales import LIMITS

INFINITY_BITS = 0x7F800000
MAGNITUDE_BITS = 0x7FFFFFFF
NAN_BITS = 0x7FFFFFFF


def raised(amax: Any, least_amax: Any) -> Any:
    """The larger of amax, int32 bits as in `sf_of_amax`, and the positive float32 least_amax, as bits."""
    return T.max(amax, T.reinterpret(least_amax, "int32"))


def sf_of_amax(amax: Any, fmt: str, round_sf: bool) -> tuple[Any, Any]:
    """`(sf, factor)` of a block, float32 expressions: the scale factor, and the factor that x is multiplied by.

    amax is int32, the bits of max |x| as a float32, and at least 2**-126 times the largest value of fmt. Such bits
    compare in order, with NaN above infinity. An amax of infinity or NaN gives an sf of infinity or NaN.

    With round_sf no division is needed. Let amax = m * 2**e and the largest value of fmt = L * 2**k, with m and L in
    [1, 2). The quotient m / L rounds to more than 1 exactly if m > L, so sf is 2**(e - k), or twice that if m > L.
    """
    largest, _ = LIMITS[fmt]
    if not round_sf:
        value = T.reinterpret(amax, "float32")
        return value / T.float32(largest), T.float32(largest) / value
    half, exponent = frexp(largest)  # L / 2 and k + 1
    mantissa = int((2 * half - 1) * 2**23)
    rounded_up = (T.reinterpret(amax, "uint32") + T.uint32(0x007FFFFF - mantissa)) & T.uint32(INFINITY_BITS)
    power = rounded_up - T.uint32((exponent - 1) << 23)
    is_finite, is_infinite = amax < INFINITY_BITS, amax == INFINITY_BITS
    not_finite = T.if_then_else(is_infinite, T.uint32(INFINITY_BITS), T.uint32(NAN_BITS))
    sf = T.if_then_else(is_finite, power, not_finite)
    # The exponent fields of 2**k and 2**-k sum up to 254. The reciprocal of infinity is 0, that of NaN is NaN.
    not_finite = T.if_then_else(is_infinite, T.uint32(0), T.uint32(NAN_BITS))
    factor = T.if_then_else(is_finite, T.uint32(0x7F000000) - power, not_finite)
    return T.reinterpret(sf, "float32"), T.reinterpret(factor, "float32")


@T.macro
def encode_e4m3(scaled: T.Buffer, words: T.Buffer) -> None:
    """Encode float32 (4 * n,) as codes packed in uint32 (n,), to nearest, ties to even, saturating."""
    codes = T.view(words, scaled.shape, "float8_e4m3fn")
    for j in T.vectorized(scaled.shape[0]):
        codes[j] = T.cast(scaled[j], "float8_e4m3fn")


@T.macro
def encode_e2m1(scaled: T.Buffer, words: T.Buffer, are_bounded: bool) -> None:
    """Encode float32 (8 * n,) as codes packed in uint32 (n,), to nearest, ties to even, saturating.

    `are_bounded`: see `encode_e2m1x8`.
    """
    for j in T.unroll(words.shape[0]):
        words[j] = encode_e2m1x8((scaled[8 * j + k] for k in range(8)), are_bounded)
