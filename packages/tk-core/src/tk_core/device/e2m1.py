"""e2m1 (FP4): casts from float32 and to e4m3.

The values 0, .5, 1, 1.5, 2, 3, 4, 6 have the codes 0 to 7. The values are .5 apart up to 2, then 1 apart, and 2 apart
from 4 on; hence, with `round` to the nearest integer, ties to even,

    code(a) = min(round(2 * a), round(a) + 2, round(a / 2) + 4)          for 0 <= a <= 6.

Adding a power of two whose last place is worth the step rounds in this way, and leaves the integer in the low bits of
the sum: three additions and two minima, no branch. Fused multiply-adds by 1/2 and 2 give the three sums the same
exponent, so that one integer instruction finds the least of them. From sm_100 on there are instructions for casts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tk_core.headers import Header

_E2M1 = Header(__file__)


def encode_e2m1x8(values: Iterable[Any], are_bounded: bool = False) -> Any:
    """Eight float32 to eight codes in a uint32, the first in the lowest nibble.

    Values saturate, and NaN becomes +6; before sm_100, -6 if its sign bit is set, which no arithmetic on a GPU sets.
    `are_bounded`: all magnitudes are below 7, as they are if the scale was made from the amax of the group; if one is
    not, all eight codes are unspecified.
    """
    return _E2M1.call("uint32", f"tk_encode_e2m1x8<{str(are_bounded).lower()}>", *values)


def e2m1x8_by_power(x: Sequence[Any], power: Any) -> Any:
    """Codes of x * power: x is eight bfloat16 in four uint32, `power` a power of two, twice as bfloat16 in a uint32.

    For GPUs without an instruction that casts to FP4. Products must be finite and below 7 in magnitude, as they are if
    the power was made from the amax of the block.
    """
    return _E2M1.call("uint32", "tk_e2m1x8_by_power", *x, power)


def e4m3_of_e2m1_magnitudes(shift: Any, low: Any, high: Any) -> Any:
    """Assign e4m3 codes of the values 0 to 1.5 times 2**shift to the uint32 variable `low`, of 2 to 6 to `high`."""
    return _E2M1.call("void", "tk_e4m3_of_e2m1_magnitudes", shift, low, high)


def e4m3_of_e2m1x8(codes: Any, low: Any, high: Any, words: Any) -> Any:
    """Store e4m3 codes of eight e2m1 codes at address `words`, two uint32; low, high: see `e4m3_of_e2m1_magnitudes`."""
    return _E2M1.call("void", "tk_e4m3_of_e2m1x8", codes, low, high, words)
