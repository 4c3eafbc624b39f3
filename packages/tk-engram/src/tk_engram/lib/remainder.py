"""The remainder of a 64-bit hash by the size of a table, without a division: by the size's reciprocal, made before.

Both are plain functions of values that `u32`, `u64` and `where` work on: numpy's integers in tests, TileLang's values
in the kernel, which makes a macro of the remainder.
"""

from collections.abc import Callable
from typing import Any

Convert = Callable[[Any], Any]


def reciprocal_of(size: Any, u64: Convert, divide: Callable[[Any, Any], Any]) -> Any:
    """2 · ⌊(2⁶³ - 1) / size⌋ as uint64, for 1 ≤ size < 2³¹. `divide` is the quotient of two uint64, rounded down."""
    return divide(u64(2**63 - 1), u64(size)) * u64(2)


def floor_remainder(
    x: Any, size: Any, reciprocal: Any, u32: Convert, u64: Convert, where: Callable[[Any, Any, Any], Any]
) -> Any:
    """x mod size as uint32, never negative, for an int64 x that is held in uint64, and 1 ≤ size < 2³¹ (uint32).

    For x < 0, x mod size = size - 1 - (~x mod size), so only a = x or ~x, below 2⁶³, is divided. The reciprocal r is
    2 · ((2⁶³ - 1 - e) / size) with 0 ≤ e < size, so a · r / 2⁶⁴ = a / size - a · (1 + e) / (size · 2⁶³) is less than
    a / size by less than 1. Rounded down, it is the quotient or one less; then the rest is below 2 · size < 2³².
    """
    sign = u64(0) - (x >> u64(63))  # all bits of it
    a = x ^ sign
    # ⌊a · r / 2⁶⁴⌋ from products of 32-bit halves; of the quotient only the low half is needed.
    a_low = u64(u32(a))
    a_high = a >> u64(32)
    r_low = u64(u32(reciprocal))
    r_high = reciprocal >> u64(32)
    middle = a_high * r_low + (a_low * r_low >> u64(32))
    carry = (u64(u32(middle)) + a_low * r_high) >> u64(32)
    quotient = u32(a_high * r_high + (middle >> u64(32)) + carry)
    rest = u32(a) - quotient * size
    remainder = rest - where(rest >= size, size, u32(0))
    return (remainder ^ u32(sign)) + (size & u32(sign))
