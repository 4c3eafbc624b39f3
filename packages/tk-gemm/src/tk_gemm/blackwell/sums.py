"""A tile's sums in tensor memory: the warp that multiplies hands them to the four that store, and gets them back."""

from typing import NamedTuple

import tilelang.language as T

from tk_gemm.blackwell.tiles import BLOCK
from tk_gemm.scheduler import local_int


class Sums(NamedTuple):
    """A tile's sums, and how many tiles a thread has seen."""

    parts: tuple[T.Buffer, ...]  # float32 (128, 128) in tensor memory, of each 128 columns
    summed: T.Buffer  # barrier: the tile's products are done
    taken: T.Buffer  # barrier: the storing threads have read the sums
    parity: T.Buffer  # int32 (1), of the number of tiles before this one


def sums(num_parts: int) -> Sums:
    """Sums of 128 · num_parts columns."""
    parts = tuple(T.alloc_tmem([BLOCK, BLOCK], "float32") for _ in range(num_parts))
    return Sums(parts, T.alloc_barrier([1]), T.alloc_barrier([BLOCK]), local_int())


@T.macro
def wait_taken(s: Sums) -> None:
    """Wait until the sums may be written."""
    T.mbarrier_wait_parity(s.taken[0], s.parity[0] ^ 1)


@T.macro
def hand_over(s: Sums) -> None:
    """Signal, once the tile's products are done, that the sums may be read."""
    T.tcgen05_mma_arrive(s.summed[0])


@T.macro
def wait_summed(s: Sums) -> None:
    """Wait until the sums may be read."""
    T.mbarrier_wait_parity(s.summed[0], s.parity[0])


@T.macro
def give_back(s: Sums) -> None:
    """Signal that this thread has read its sums."""
    T.mbarrier_arrive(s.taken[0])


@T.macro
def move_on(s: Sums) -> None:
    """Go to the next tile."""
    s.parity[0] = s.parity[0] ^ 1
