"""Reads of rows that begin at any address: TileLang vectorizes a load only where it can prove its alignment.

An address is a pointer, such as T.address_of(x[row, col]); `words` points to four uint32.
"""

from typing import Any

from tk_core.headers import Header

_ROW_WORDS = Header(__file__)


def past_16_bytes(address: Any) -> Any:
    """Number of bytes, int32, from the last multiple of 16 up to an address."""
    return _ROW_WORDS.call("int32", "tk_past_16_bytes", address)


def load_16_bytes(address: Any, words: Any) -> Any:
    """Load 16 bytes from global memory; the address is a multiple of 16."""
    return _ROW_WORDS.call("void", "tk_load_16_bytes", address, words)


def is_above(x: Any, bound: Any) -> Any:
    """1 if x > bound or x is NaN, 0 otherwise: uint32 of two float32, of which `bound` is no NaN."""
    return _ROW_WORDS.call("uint32", "tk_is_above", x, bound)
