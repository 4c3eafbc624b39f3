"""Asynchronous copies from global to shared memory, which a thread waits for in groups.

Addresses are pointers, such as T.address_of(x[row, col]), aligned to the 4, 8 or 16 bytes of a copy.
"""

from typing import Any

from tk_core.headers import Header

_GATHER_ASYNC = Header(__file__)


def gather_async(shared: Any, row0: Any, row: Any, stride: Any, limit: Any, num_bytes: int) -> Any:
    """Start to copy `num_bytes` of a row chosen at run time to `shared`; zeros if the row is not below the limit.

    `row0` is the source address for row 0. `row` and `limit` are uint32; `stride`, uint32, is bytes from row to row.
    """
    return _GATHER_ASYNC.call("void", f"tk_gather_async<{num_bytes}>", shared, row0, row, stride, limit)


def wait_for_groups(num_groups: Any) -> Any:
    """Wait until at most that many groups of this thread, three or fewer, are in flight."""
    return _GATHER_ASYNC.call("void", "tk_wait_for_groups", num_groups)
