"""Global memory with cache hints, narrow predicated loads, and prefetches into L2, for thread-level kernels.

Addresses and registers are pointers, such as T.address_of(x[row, col]) gives; `words` points at four uint32.
"""

from typing import Any

from tk_core.headers import Header

_MEMORY = Header(__file__)


def load_streaming(words: Any, address: Any, valid: Any) -> Any:
    """Load 16 bytes, zeros where not `valid`, that the caches need not keep, as they are read only once.

    The loads are issued in the order of the calls.
    """
    return _MEMORY.call("void", "tk_load_streaming", words, address, valid)


def load_streaming_to(to: Any, address: Any, valid: Any) -> Any:
    """The same to elements of any type, in an order that nvcc chooses."""
    return _MEMORY.call("void", "tk_load_streaming_to", to, address, valid)


def load_mostly_evict_first(words: Any, address: Any, valid: Any) -> Any:
    """Load 16 bytes, zeros where not `valid`; three quarters of what is read so leaves L2 before other lines."""
    return _MEMORY.call("void", "tk_load_mostly_evict_first", words, address, valid)


def load_16_bits(address: Any, valid: Any) -> Any:
    """Two bytes as a uint32; unspecified where not `valid`, where nothing is read."""
    return _MEMORY.call("uint32", "tk_load_16_bits", address, valid)


def store_evict_first(address: Any, words: Any) -> Any:
    """Store 16 bytes to a line that is to leave L2 before others."""
    return _MEMORY.call("void", "tk_store_evict_first", address, words)


def prefetch_line(address: Any) -> Any:
    """Start to bring the cache line of an address into L2."""
    return _MEMORY.call("void", "tk_prefetch_line", address)


def prefetch_bytes(address: Any, num_bytes: Any) -> Any:
    """Start to bring bytes into L2, from sm_90 on; address and number are multiples of 16."""
    return _MEMORY.call("void", "tk_prefetch_bytes", address, num_bytes)
