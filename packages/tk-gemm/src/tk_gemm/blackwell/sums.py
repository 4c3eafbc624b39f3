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
