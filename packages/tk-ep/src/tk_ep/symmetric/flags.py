"""How the kernels of different ranks wait for each other: memory.py has the words."""

from typing import NamedTuple

import tilelang.language as T

from tk_ep.device.system import (
    await_epoch,
    fail,
    fence_system,
    load_acquire,
    load_relaxed,
    store_relaxed,
    take_ticket,
)
from tk_ep.symmetric import memory


class Ranks(NamedTuple):
    """A rank's view of all ranks' buffers."""

    own: T.Buffer  # int32 (units, 4)
    peers: tuple[T.Buffer, ...]  # of each rank, itself included
    rank: T.PrimExpr
    op: int
    limit: T.PrimExpr  # int64, nanoseconds
    host: T.PrimExpr  # int64, where a failure is told

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """For loops over ranks that are unrolled as the kernel is built: buffers cannot be chosen later."""
        return tuple(range(len(self.peers)))


def word(buffer: T.Buffer, index: T.PrimExpr) -> T.PrimExpr:
    """The address of a word of a rank's flags."""
    return T.access_ptr(buffer[index // 4, index % 4], "rw")


@T.macro
def await_ranks(r: Ranks, first: int, ahead: int) -> T.PrimExpr:
    """Wait until the flags from word `first` on, one for each rank, are `ahead` epochs ahead of this rank's own.

    All threads of the block call it. Returns whether the buffer has failed, by now or before.
    """
    thread = T.get_thread_binding()
    failed, wanted, found = (T.alloc_var("int32", init=0) for _ in range(3))
    if thread < len(r.peers):
        failed = load_relaxed(word(r.own, memory.FAILED))
        wanted = load_relaxed(word(r.own, memory.EPOCH + r.op)) + ahead
        if failed == 0:
            found = await_epoch(word(r.own, first + thread), wanted, r.limit)
            if found - wanted < 0:
                failed = 1
                fail(word(r.own, memory.FAILED), r.host, r.op, thread, wanted, found)
    return T.syncthreads_or(failed)


@T.macro
def has_failed(r: Ranks) -> T.PrimExpr:
    """Whether the buffer has failed. All threads of the block call it."""
    failed = T.alloc_var("int32", init=0)
    if T.get_thread_binding() == 0:
        failed = load_acquire(word(r.own, memory.FAILED))
    return T.syncthreads_or(failed)


@T.macro
def is_last_block(r: Ranks, num_blocks: T.PrimExpr) -> T.PrimExpr:
    """Whether all other thread blocks are done, and the buffer has not failed: what they wrote is visible.

    All threads of the block call it, when they have finished their stores.
    """
    is_last, taken = T.alloc_var("int32", init=0), T.alloc_var("int32", init=-1)
    T.sync_threads()
    if T.get_thread_binding() == 0:
        taken = take_ticket(word(r.own, memory.TICKET))
    if taken == num_blocks - 1:
        store_relaxed(word(r.own, memory.TICKET), 0)
        if load_relaxed(word(r.own, memory.FAILED)) == 0:
            is_last = 1
    return T.syncthreads_or(is_last)


@T.macro
def signal(r: Ranks, first: int, ahead: int) -> None:
    """Set this rank's flag, from word `first` on, at all ranks to `ahead` epochs after this rank's own."""
    thread, epoch = T.get_thread_binding(), T.alloc_var("int32", init=0)
    if thread < len(r.peers):
        epoch = load_relaxed(word(r.own, memory.EPOCH + r.op)) + ahead
        fence_system()
    for to in r.all_ranks:
        if thread == to:
            store_relaxed(word(r.peers[to], first + r.rank), epoch)


@T.macro
def finish_call(r: Ranks) -> None:
    """In the last block of a call's last kernel: let all ranks send again, and advance the epoch."""
    signal(r, memory.flag_of(memory.CREDIT, r.op), 1)
    advance(r)


@T.macro
def advance(r: Ranks) -> None:
    """Go to the next epoch of the op. All threads of one block call it."""
    T.sync_threads()
    if T.get_thread_binding() == 0:
        store_relaxed(word(r.own, memory.EPOCH + r.op), load_relaxed(word(r.own, memory.EPOCH + r.op)) + 1)
