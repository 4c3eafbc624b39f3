"""Bulk stores, and stores to other blocks of a cluster, whose bytes an mbarrier in shared memory counts.

Arguments named `barrier`, `here` and `there` are pointers, such as T.access_ptr gives.
"""

from typing import Any

from tk_core.headers import Header, builtin

_ASYNC_COPY = Header(__file__)


def init_mbarrier(barrier: Any) -> Any:
    """Initialize an mbarrier for one arrival; by one thread, before a barrier of all threads."""
    return _ASYNC_COPY.call("handle", "tk_init_mbarrier", barrier)


def expect_bytes(barrier: Any, num_bytes: Any) -> Any:
    """Arrive at an mbarrier, which opens once so many bytes have arrived too; by one thread."""
    return _ASYNC_COPY.call("handle", "tk_expect_bytes", barrier, num_bytes)


def send_to_cluster(there: Any, here: Any, barrier: Any, rank: Any) -> Any:
    """Store 16 bytes of this block's shared memory to that of block `rank`, whose mbarrier counts them.

    That mbarrier must have been initialized: a barrier of the cluster comes before.
    """
    return _ASYNC_COPY.call("handle", "tk_send_to_cluster", there, here, barrier, rank)


def wait_for_cluster(barrier: Any) -> Any:
    """Wait until the mbarrier's first phase is complete, in which other blocks of the cluster have sent."""
    return _ASYNC_COPY.call("handle", "tk_wait_for_cluster", barrier)


def bulk_store(there: Any, here: Any, num_bytes: Any) -> Any:
    """Start to store bytes of shared memory to global memory: TileLang's own function, which has no name in Python."""
    return builtin("handle", "tl::tma_store", there, here, num_bytes)
