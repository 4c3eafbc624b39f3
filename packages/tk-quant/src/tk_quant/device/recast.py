"""Casts of e4m3 data with one sf to e4m3 data with another, in thread-level kernels that decode each code twice."""

from typing import Any

from tk_core.headers import Header, builtin

_RECAST = Header(__file__)


def atomic_max(address: Any, x: Any) -> Any:
    """Raise the uint32 at an address to x, atomically."""
    return builtin("void", "atomicMax", address, x)


def raise_amax(amax: Any, codes0: Any, sf0: Any, codes1: Any, sf1: Any) -> Any:
    """Raise four amax, float32 bits in uint32 at address `amax`, to |code * sf| of four codes in each of two rows."""
    return _RECAST.call("void", "tk_raise_amax", amax, codes0, sf0, codes1, sf1)


def recast(codes: Any, sf: Any, factors: Any) -> Any:
    """The e4m3 codes of code * sf * factor, of four codes in a uint32; `factors` is the address of four float32."""
    return _RECAST.call("uint32", "tk_recast", codes, sf, factors)
