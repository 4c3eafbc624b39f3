"""Memory that other GPUs or the host read and write: accesses at system scope, and waits that end at a limit.

Arguments named `address`, `source` and `destination` are pointers, as from T.access_ptr; `host` is the address of int32
words in pinned memory as an int64.
"""

from typing import Any

from tk_core.headers import Header

_SYSTEM = Header(__file__)


def load_acquire(address: Any) -> Any:
    """Load an int32; what its writer wrote before releasing it is visible then."""
    return _SYSTEM.call("int32", "tk_load_acquire", address)


def load_relaxed(address: Any) -> Any:
    """Load an int32 that others may write at the same time, without waiting for it as load_acquire does."""
    return _SYSTEM.call("int32", "tk_load_relaxed", address)


def store_relaxed(address: Any, value: Any) -> Any:
    """Store an int32 that others may read at the same time; after fence_system it releases what came before."""
    return _SYSTEM.call("void", "tk_store_relaxed", address, value)


def tell(address: Any, epoch: Any, value: Any) -> Any:
    """Store two int32 at once, at a multiple of 8 bytes."""
    return _SYSTEM.call("void", "tk_tell", address, epoch, value)


def load_told(address: Any) -> Any:
    """What `tell` stored: an int64 with the epoch in its low half, the value in its high half."""
    return _SYSTEM.call("int64", "tk_load_told", address)


def nanoseconds() -> Any:
    """The GPU's clock, int64."""
    return _SYSTEM.call("int64", "tk_nanoseconds")


def fence_system() -> Any:
    """Order all that is visible to this thread before the stores that follow, for all GPUs and the host."""
    return _SYSTEM.call("void", "tk_fence_system")


def take_ticket(address: Any) -> Any:
    """Add 1 to an int32 and return what it was. The taker of a ticket sees what takers of earlier ones saw."""
    return _SYSTEM.call("int32", "tk_take_ticket", address)


def await_epoch(address: Any, wanted: Any, limit: Any) -> Any:
    """Wait until an epoch, int32, is `wanted` or later, for at most `limit` (int64) nanoseconds; return it."""
    return _SYSTEM.call("int32", "tk_await", address, wanted, limit)


def store_on_host(host: Any, index: Any, value: Any) -> Any:
    """Store word `index`."""
    return _SYSTEM.call("void", "tk_store_on_host", host, index, value)


def fail(address: Any, host: Any, op: Any, awaited: Any, wanted: Any, found: Any) -> Any:
    """Set the int32 at `address`, and if it was 0 store 1 and the other arguments at `host`, the 1 last."""
    return _SYSTEM.call("void", "tk_fail", address, host, op, awaited, wanted, found)


def fence_bulk_copies() -> Any:
    """Order what this thread has written, or acquired, before the bulk copies that follow.

    What it wrote to shared memory alone takes T.fence_proxy_async(), which does not wait for global memory.
    """
    return _SYSTEM.call("void", "tk_fence_bulk_copies")


def bulk_store(destination: Any, source: Any, num_bytes: Any) -> Any:
    """Start a bulk store from shared to global memory, of a GPU's own or another's; all are multiples of 16 bytes."""
    return _SYSTEM.call("void", "tk_bulk_store", destination, source, num_bytes)
