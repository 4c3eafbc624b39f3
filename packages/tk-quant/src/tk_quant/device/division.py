"""IEEE divisions of float32 in a few instructions without a branch.

nvcc compiles a division to 8 instructions and a branch to the special cases, which keeps it from interleaving several
divisions. With r = 1 / d, approximately, where each bracket and each sum is one fused multiply-add,

    s = r + r * (1 - d * r)                             is 1 / d correctly rounded, for d from 2**-126 to 2**126;
    q = l * s;  quotient = q - (d * q - l) * s          is l / d, if

  - d = 1 + exp(-l) for any float32 l within +-87, with CUDA's exp or one unit in the last place off, or
  - one of l and d is 448, and no intermediate result is subnormal.

The bracket is d * q - l and not l - d * q, so that l = -0 gives -0. The gpu tier of tests/device/test_division.py
checks all float32.
"""

from typing import Any

from tk_core.headers import Header

_DIVISION = Header(__file__)

NEAR_SF = 0.194
"""Largest sf for which every e4m3 code times sf is within +-87, or NaN."""


def sigmoid(x: Any, result: Any, product: Any, is_near: bool = False) -> Any:
    """Store 1 / (1 + exp(-x)) and x / (1 + exp(-x)), with the bits of IEEE divisions, at two float32 addresses.

    `is_near`: x is known to be within +-87, or NaN.
    """
    return _DIVISION.call("void", "tk_sigmoid_near" if is_near else "tk_sigmoid", x, result, product)


def scale_of_amax(amax_bits: Any, sf_bits: Any, factor_bits: Any, round_sf: bool) -> Any:
    """From the bits of an amax of at least 1e-4, store those of an e4m3 group's sf and of what x is multiplied by.

    Both are stored at uint32 addresses. sf is NaN or infinite where amax is, and the factor NaN or 0 then.
    """
    return _DIVISION.call("void", f"tk_scale_of_amax<{str(round_sf).lower()}>", amax_bits, sf_bits, factor_bits)
