"""A tile's way through K in BF16: sums stay in the accumulators, in registers, through all of K.

A step's product begins before the one before it is done, so the tensor core never waits for the next instruction.
"""

from collections.abc import Callable
from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring
from tk_gemm import bf16_operands, scheduler
from tk_gemm.bf16_operands import Operands, part
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.scheduler import Scheduler, Tile


class Stages(NamedTuple):
    """The stages of the ring in shared memory; the first dimension is the stage."""

    a: T.Buffer  # bfloat16 (stages, block_m, 64), transposed (stages, 64, block_m)
    b: T.Buffer  # bfloat16 (stages, block_n, 64), transposed (stages, 64, block_n)
    tile: T.Buffer  # int32 (stages, fields of Tile)


class Share(NamedTuple):
    """What a warpgroup multiplies of each step."""

    corner: tuple[int, int]  # its first row and column
    x: Operands
    stages: Stages
    ring: Ring


def stages(shape: TileShape, x: Operands) -> Stages:
    """The stages of a tile's operands."""
    operands = bf16_operands.stages(x, shape.num_stages, shape.block_m, shape.block_n)
    return Stages(*operands, T.alloc_shared((shape.num_stages, len(Tile._fields)), "int32", scope="shared"))


@T.macro
def load(s: Scheduler, shape: TileShape, x: Operands, to: Stages, r: Ring, sides: str) -> None:
    """In a loading warp: load "a", "b" or "ab" for one tile after the other."""
    while s.index[0] < s.total[0]:
        bf16_operands.load(s.tile, x, shape.loaded_m, shape.block_n, to.a, to.b, r, sides)
        scheduler.next_tile(s)
    ring.wait_empty(r)
    ring.fill(r)


@T.macro
def sum_up(s: Share, tile: Tile, acc: T.Buffer, at_last_product: Callable[[], None]) -> None:
    """acc = Σ over K; at_last_product() runs during the last product.

    The tile's first stage is full. Behind its last is a full one, too: the next tile's, or the end.
    """
    last = T.alloc_local((1,), "int32")  # The stage of the last product that was issued.
    _multiply(s, True, acc)
    last[0] = s.ring.stage[0]
    ring.move_on(s.ring)
    ring.wait_full(s.ring)
    for _ in T.serial(tile.num_steps[0] - 1):
        _multiply(s, False, acc)
        T.wait_wgmma(1)
        ring.release(s.ring, last[0])
        last[0] = s.ring.stage[0]
        ring.move_on(s.ring)
        ring.wait_full(s.ring)
    at_last_product()
    T.wait_wgmma(0)
    ring.release(s.ring, last[0])


@T.macro
def _multiply(s: Share, is_first: bool, acc: T.Buffer) -> None:
    """Begin acc += a step's product, or acc = it."""
    row, col = s.corner
    x = s.x
    T.wgmma_gemm(
        part(s.stages.a, s.ring.stage[0], slice(row, row + 64), slice(None), x.a_is_transposed),
        part(s.stages.b, s.ring.stage[0], slice(col, col + acc.shape[1]), slice(None), x.b_is_transposed),
        acc,
        transpose_A=x.a_is_transposed,
        transpose_B=not x.b_is_transposed,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=is_first,
    )
