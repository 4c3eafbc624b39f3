"""float32 divisions that return the IEEE result bit for bit, in a few instructions without a branch.

nvcc compiles a division to 8 instructions and a branch to the special cases; the branch keeps nvcc from interleaving
several divisions. Let r be an approximate 1 / d. With each bracket and each sum as one fused multiply-add,

    s = r + r * (1 - d * r)                             is 1 / d correctly rounded, for d from 2**-126 to 2**126;
    q = l * s;  quotient = q - (d * q - l) * s          is l / d, if

  - d = 1 + exp(-l) for any float32 l within ±87, with exp as CUDA's or one unit in the last place off, or
  - one of l and d is 448 or 6, and no intermediate result is subnormal.

For a bfloat16 l within ±87, s = r is accurate enough, except if d = 2 - 2**-23: then r has to be the float32 nearest to
1 / d, which nvcc's own division needs as well. The bracket is d * q - l and not l - d * q, so that l = -0 gives -0. The
tests try all float32 and all bfloat16. Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_quant.lib.quantize import INFINITY_BITS, LIMITS
from tk_quant.lib.scales_io import scale_of_bounded_amax

NEAR_SF = 0.194
"""Up to this sf every e4m3 code times sf is within ±87, or NaN."""
NEAR_LIMIT = 0x42AE
"""The bits of 87 as bfloat16."""
# A factor that an amax is multiplied by, so that neither the product nor its reciprocal is subnormal.
_DOWN = 0.25


@T.macro
def _reciprocal(d: T.float32) -> T.float32:
    r = T.fast_rcp(d)
    return T.fma(r, T.fma(-d, r, T.float32(1)), r)


@T.macro
def _quotient(x: T.float32, d: T.float32, s: T.float32) -> T.float32:
    q = x * s
    return T.fma(-T.fma(d, q, -x), s, q)


@T.macro
def near_sigmoid(x: T.float32) -> tuple[T.float32, T.float32]:
    """Sigmoid and SiLU, 1 / (1 + exp(-x)) and x / (1 + exp(-x)), for x within ±87 or NaN."""
    d = T.float32(1) + T.exp(-x)
    s = _reciprocal(d)
    return s, _quotient(x, d, s)


@T.macro
def near_silu(x: T.float32) -> T.float32:
    """SiLU, x / (1 + exp(-x)), for a bfloat16 x within ±87 or NaN."""
    d = T.float32(1) + T.exp(-x)
    return _quotient(x, d, T.fast_rcp(d))


@T.macro
def _quick_scale(amax: T.int32, fmt: str) -> tuple[T.float32, T.float32]:
    largest, value = LIMITS[fmt][0], T.reinterpret(amax, "float32")
    sf = _quotient(value, T.float32(largest), T.float32(1 / largest))
    scaled = value * T.float32(_DOWN)
    factor = _quotient(T.float32(largest * _DOWN), scaled, _reciprocal(scaled))
    is_infinite = amax == INFINITY_BITS
    return T.if_then_else(is_infinite, value, sf), T.if_then_else(is_infinite, T.float32(0), factor)


def quick_scale_of_amax(amax: Any, fmt: str, round_sf: bool) -> tuple[Any, Any]:
    """The same bits as `scale_of_bounded_amax`, for e4m3 and e2m1, by divisions without a branch."""
    return scale_of_bounded_amax(amax, fmt, True) if round_sf else _quick_scale(amax, fmt)
