"""A ring of stages in shared memory, which some warps fill and others empty."""

from collections.abc import Callable
from typing import NamedTuple

import tilelang.language as T
from tvm.tirx import BufferRegion

from tk_core.device.barriers import is_over


class Ring(NamedTuple):
    """The barriers of a ring, and a thread's place in it."""

    full: T.Buffer  # barriers: a stage's operands have arrived
    empty: T.Buffer  # barriers: a stage's operands have been multiplied
    stage: T.Buffer  # int32 (1)
    parity: T.Buffer  # int32 (1), of the round


def local_int() -> T.Buffer:
    """An int32 (1) in registers, 0."""
    return T.alloc_var("int32", init=0)


def ring(num_stages: int, num_fills: int, num_releases: int) -> Ring:
    """A ring of empty stages, and how often each is filled, and released, in a round."""
    full = T.alloc_barrier([num_fills] * num_stages)
    empty = T.alloc_barrier([num_releases] * num_stages)
    return Ring(full, empty, local_int(), local_int())


@T.macro
def wait_full(r: Ring) -> None:
    """Wait until the stage has its operands."""
    T.mbarrier_wait_parity(r.full[r.stage[0]], r.parity[0])


@T.macro
def while_filling(r: Ring, work: Callable[[], None]) -> None:
    """Do work that does not need the stage, and return when the stage has its operands.

    The barrier is polled before the work, which hides the poll's latency, and waited for only after it.
    """
    is_full = T.alloc_var("int32")
    is_full = is_over(r.full[r.stage[0]], r.parity[0])
    work()
    if is_full == 0:
        wait_full(r)


@T.macro
def wait_empty(r: Ring) -> T.PrimExpr:
    """Wait until the stage may be filled, and return its index.

    TileLang is told the index's range: without it, each address in shared memory takes divisions.
    """
    T.mbarrier_wait_parity(r.empty[r.stage[0]], r.parity[0] ^ 1)
    stage = r.stage[0]
    T.assume(stage >= 0)
    T.assume(stage < r.full.shape[0])
    return stage


@T.macro
def load(r: Ring, source: BufferRegion, target: BufferRegion) -> None:
    """Begin to load a tile into the stage, by TMA."""
    T.tma_copy(source, target, barrier=r.full[r.stage[0]], leader_scope_threads=32)


@T.macro
def fill(r: Ring) -> None:
    """Arrive at the stage's barrier, after its loads have been issued or its values written, and move on."""
    if T.shuffle_elect(32):
        T.mbarrier_arrive(r.full[r.stage[0]])
    move_on(r)


@T.macro
def fill_by_lanes(r: Ring) -> None:
    """Arrive at the stage's barrier with each lane, after each has written values, and move on.

    A lane's arrival releases what that lane wrote. One for all, behind a warp's barrier, would do, but racecheck does
    not see that order.
    """
    T.mbarrier_arrive(r.full[r.stage[0]])
    move_on(r)


@T.macro
def release(r: Ring, stage: T.PrimExpr) -> None:
    """Give a stage back to the warps that fill it."""
    if T.shuffle_elect(32):
        T.mbarrier_arrive(r.empty[stage])


@T.macro
def release_by_lanes(r: Ring, stage: T.PrimExpr) -> None:
    """Give a stage that lanes write, and each lane has read, back to them; each lane arrives, as in fill_by_lanes."""
    T.mbarrier_arrive(r.empty[stage])


@T.macro
def move_on(r: Ring) -> None:
    """Go to the next stage."""
    r.stage[0] += 1
    if r.stage[0] == r.full.shape[0]:
        r.stage[0] = 0
        r.parity[0] = r.parity[0] ^ 1


@T.macro
def send(coordinates: tuple[T.Buffer, ...], sent: T.Buffer, stage: T.PrimExpr) -> None:
    """Put coordinates, each an int32 (1) in registers, into a stage; only one lane does."""
    for x, _ in enumerate(coordinates):
        sent[stage, x] = coordinates[x][0]


@T.macro
def receive(coordinates: tuple[T.Buffer, ...], sent: T.Buffer, stage: T.PrimExpr) -> None:
    """Read the coordinates in a stage, which may be released then."""
    for x, _ in enumerate(coordinates):
        coordinates[x][0] = sent[stage, x]
