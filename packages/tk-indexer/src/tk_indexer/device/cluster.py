"""Reads of the shared memory of the cluster's other thread blocks."""

from typing import Any

from tk_core.headers import Header

_CLUSTER = Header(__file__)


def load_from_cluster(address: Any, rank: Any) -> Any:
    """The int32 of block `rank` at the place that `address`, a pointer, has in this block's shared memory.

    A cluster barrier is needed before, so that the value is there, and one after, before it may change.
    """
    return _CLUSTER.call("int32", "tk_load_from_cluster", address, rank)
