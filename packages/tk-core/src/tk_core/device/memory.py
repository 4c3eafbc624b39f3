"""Stores to global memory with a cache hint, and prefetches into L2, for thread-level kernels.

An address is a pointer, such as T.address_of(x[row, col]); `words` points to four uint32.
"""

from typing import Any

from tk_core.headers import Header

_MEMORY = Header(__file__)


def store_evict_first(address: Any, words: Any) -> Any:
    """Store 16 bytes with a cache hint that the line leave L2 before others (evict_first)."""
    return _MEMORY.call("void", "tk_store_evict_first", address, words)


def prefetch_line(address: Any) -> Any:
    """Prefetch the cache line of an address into L2."""
    return _MEMORY.call("void", "tk_prefetch_line", address)


def prefetch_bytes(address: Any, num_bytes: Any) -> Any:
    """Prefetch `num_bytes` from an address on into L2 (sm_90 or newer); both are multiples of 16."""
    return _MEMORY.call("void", "tk_prefetch_bytes", address, num_bytes)
