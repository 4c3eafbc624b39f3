"""Barriers of a cluster, and reads of the shared memory of its other thread blocks."""

from typing import Any

from tk_core.headers import Header

_CLUSTER = Header(__file__)


def load_from_cluster(address: Any, rank: Any) -> Any:
    """The int32 of block `rank` at the place that `address`, a pointer, has in this block's shared memory.

    A cluster barrier is needed before, so that the value is there, and one after, before it may change.
    """
    return _CLUSTER.call("int32", "tk_load_from_cluster", address, rank)


def cluster_arrive() -> Any:
    """Arrive at the cluster's barrier: what this thread read and wrote is done. Unlike TileLang's, a fence for nvcc."""
    return _CLUSTER.call("void", "tk_cluster_arrive")


def cluster_arrive_first() -> Any:
    """Arrive at the cluster's barrier, without a fence: for a thread that has written nothing."""
    return _CLUSTER.call("void", "tk_cluster_arrive_first")


def cluster_wait() -> Any:
    """Wait until all threads of the cluster have arrived."""
    return _CLUSTER.call("void", "tk_cluster_wait")
