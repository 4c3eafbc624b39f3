"""Bulk stores, and stores to other blocks of a cluster, whose bytes an mbarrier in shared memory counts.

Arguments named `barrier`, `source` and `destination` are pointers, as from T.access_ptr.
"""

from typing import Any

from tk_core.headers import Header, builtin

_ASYNC_COPY = Header(__file__)


def init_mbarrier(barrier: Any) -> Any:
    """Initialize an mbarrier that expects one arrival. One thread calls this, before a barrier of all threads."""
    return _ASYNC_COPY.call("handle", "tk_init_mbarrier", barrier)


def expect_bytes(barrier: Any, num_bytes: Any) -> Any:
    """Arrive at an mbarrier, whose phase completes once `num_bytes` bytes have arrived too. One thread calls this."""
    return _ASYNC_COPY.call("handle", "tk_expect_bytes", barrier, num_bytes)


def send_to_cluster(destination: Any, source: Any, barrier: Any, rank: Any) -> Any:
    """Store 16 bytes of this block's shared memory to that of block `rank` of the cluster, whose mbarrier counts them.

    Block `rank` must have initialized its mbarrier: a cluster barrier is needed before the first store.
    """
    return _ASYNC_COPY.call("handle", "tk_send_to_cluster", destination, source, barrier, rank)


def wait_for_cluster(barrier: Any) -> Any:
    """Wait until the first phase of this block's mbarrier completes: all bytes that it expects have arrived."""
    return _ASYNC_COPY.call("handle", "tk_wait_for_cluster", barrier)


def bulk_store(destination: Any, source: Any, num_bytes: Any) -> Any:
    """Start a bulk store from shared to global memory, by a function of TileLang that has no name in Python."""
    return builtin("handle", "tl::tma_store", destination, source, num_bytes)
