"""Bulk stores of shared memory: TileLang's own functions, which have no name in Python.

Arguments named `here` and `there` are pointers, such as T.access_ptr gives.
"""

from typing import Any

from tk_core.headers import builtin


def bulk_store(there: Any, here: Any, num_bytes: Any) -> Any:
    """Start to store bytes of shared memory to global memory."""
    return builtin("handle", "tl::tma_store", there, here, num_bytes)


def bulk_store_to_cluster(there: Any, here: Any, rank: Any, num_bytes: Any, barrier: Any) -> Any:
    """Arrive at block `rank`'s barrier, which then waits for the bytes that this starts to store to that block.

    That barrier must have been initialized: a barrier of the cluster comes before.
    """
    import tilelang.language as T
    from tilelang import tvm

    return T.call_intrin("handle", tvm.ir.Op.get("tl.tma_store_cluster"), there, here, rank, num_bytes, barrier)
