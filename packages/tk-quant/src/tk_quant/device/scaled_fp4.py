"""bfloat16 times a power of two to e2m1 codes, in few instructions where no instruction casts to FP4."""

from collections.abc import Sequence
from typing import Any

from tk_core.headers import Header

_SCALED_FP4 = Header(__file__)


def e2m1x8_by_power(x: Sequence[Any], power: Any) -> Any:
    """Codes of eight bfloat16, four uint32 of pairs, times a power of two that a uint32 holds twice as bfloat16.

    Products must be finite and below 7 in magnitude, as they are if the power was made from the amax of the block. See
    fp4.py for how codes are found.
    """
    return _SCALED_FP4.call("uint32", "tk_e2m1x8_by_power", *x, power)
