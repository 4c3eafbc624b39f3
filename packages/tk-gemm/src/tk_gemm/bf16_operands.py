"""BF16 operands, which may be transposed, and their way into the ring: the same on Hopper and on Blackwell."""

from typing import NamedTuple

import tilelang.language as T
from tvm.tirx import BufferRegion

from tk_core.macros import ring
from tk_core.macros.ring import Ring
from tk_gemm.kernels import BF16_STEP_K
from tk_gemm.scheduler import Tile


class Operands(NamedTuple):
    """What is multiplied, in global memory. With groups along K, A and B are one group."""

    a: T.Buffer  # bfloat16 (groups, M, K), transposed (groups, K, M)
    b: T.Buffer  # bfloat16 (groups, N, K), transposed (groups, K, N)
    a_is_transposed: bool
    b_is_transposed: bool
    by_k: bool  # groups are ranges of K


def stages(x: Operands, count: int, block_m: int, block_n: int) -> tuple[T.Buffer, T.Buffer]:
    """Stages of A, bfloat16 (count, block_m, 64) or transposed (count, 64, block_m), and of B with block_n."""
    shapes = ((block_m, x.a_is_transposed), (block_n, x.b_is_transposed))
    a, b = ((BF16_STEP_K, rows) if is_transposed else (rows, BF16_STEP_K) for rows, is_transposed in shapes)
    return T.alloc_shared((count, *a), "bfloat16"), T.alloc_shared((count, *b), "bfloat16")


def part(operand: T.Buffer, first: T.PrimExpr, rows: slice, channels: slice, is_transposed: bool) -> BufferRegion:
    """Rows and channels of a group, or of a stage."""
    return operand[first, channels, rows] if is_transposed else operand[first, rows, channels]


@T.macro
def load(
    tile: Tile, x: Operands, num_rows: int, num_cols: int, a_stages: T.Buffer, b_stages: T.Buffer, r: Ring, sides: str
) -> None:
    """In a loading warp: load "a", "b" or "ab" of a tile of so many rows and columns."""
    for index in T.serial(tile.num_steps[0]):
        step = tile.first_step[0] + index
        group = 0 if x.by_k else tile.group[0]
        rows = slice(tile.row[0], tile.row[0] + num_rows)
        cols = slice(tile.col[0], tile.col[0] + num_cols)
        channels = slice(step * BF16_STEP_K, (step + 1) * BF16_STEP_K)
        stage = ring.wait_empty(r)
        if "a" in sides:
            to = part(a_stages, stage, slice(0, num_rows), slice(0, BF16_STEP_K), x.a_is_transposed)
            ring.load(r, part(x.a, group, rows, channels, x.a_is_transposed), to)
        if "b" in sides:
            ring.load(r, part(x.b, tile.weights[0], cols, channels, x.b_is_transposed), b_stages[stage, :, :])
        ring.fill(r)
