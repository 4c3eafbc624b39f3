"""CUDA's own functions on bits and warps that TileLang has no name for; they need no header."""

from typing import Any

from tk_core.headers import builtin


def byte_perm(low: Any, high: Any, selector: Any, dtype: str = "uint32") -> Any:
    """Four of the eight bytes of `low` and `high`, chosen by the nibbles of `selector`."""
    return builtin(dtype, "__byte_perm", low, high, selector)


def count_leading_zeros(x: Any) -> Any:
    """Number of zeros above the highest one of an int32."""
    return builtin("int32", "__clz", x)


def atomic_or_u32(address: Any, bits: Any) -> Any:
    """Set bits in the uint32 at an address, atomically."""
    return builtin("uint32", "atomicOr", address, bits)
