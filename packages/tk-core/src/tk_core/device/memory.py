"""Stores to global memory with a cache hint, and prefetches into L2, for thread-level kernels.

Addresses are pointers, such as T.address_of(x[row, col]) gives; `words` points at four uint32.
"""

from typing import Any

from tk_core.headers import Header

_MEMORY = Header(__file__)


def store_evict_first(address: Any, words: Any) -> Any:
    """Store 16 bytes to a line that is to leave L2 before others."""
    return _MEMORY.call("void", "tk_store_evict_first", address, words)


def prefetch_line(address: Any) -> Any:
    """Start to bring the cache line of an address into L2."""
    return _MEMORY.call("void", "tk_prefetch_line", address)


def prefetch_bytes(address: Any, num_bytes: Any) -> Any:
    """Start to bring bytes into L2, from sm_90 on; address and number are multiples of 16."""
    return _MEMORY.call("void", "tk_prefetch_bytes", address, num_bytes)
