"""What the storing warps do with a tile's sums: C is added, padding becomes zero, and each thread writes a row of D."""

from typing import NamedTuple

import tilelang.language as T

from tk_gemm import scheduler
from tk_gemm.blackwell.sums import Sums
from tk_gemm.blackwell.tiles import BLOCK, PIECE
from tk_gemm.kernels import Kind
from tk_gemm.scheduler import Tile


class Results(NamedTuple):
    """Where results go."""

    kind: Kind
    layout: T.Buffer
    c: "T.Buffer | None"  # (G, M, N)
    d: T.Buffer  # (G, M, N)


@T.macro
def store(x: Results, tile: Tile, s: Sums) -> None:
    """In the storing warps: write a tile's results, but no rows and columns past the last."""
    acc = T.alloc_fragment((BLOCK, PIECE), "float32")
    is_row = T.alloc_fragment((BLOCK,), "int32") if x.kind in ("ids", "psum") else None
    if is_row is not None:
        scheduler.find_rows(x.kind, x.layout, tile, 0, x.d.shape[1], is_row)
    T.mbarrier_wait_parity(s.summed[0], s.parity[0])
    for first in T.unroll(0, BLOCK, PIECE):
        T.copy(s.parts[0][:, first : first + PIECE], acc)
        _add_c(x.c, tile, acc, first)
        if is_row is not None:
            for i, j in T.Parallel(*acc.shape):
                acc[i, j] = T.if_then_else(is_row[i] != 0, acc[i, j], T.float32(0))
        _write(x, tile, acc, first)
    T.mbarrier_arrive(s.taken[0])


@T.macro
def _add_c(c: T.Buffer, tile: Tile, acc: T.Buffer, first: T.PrimExpr) -> None:
    if c is not None:
        width = 128 // c.dtype.bits
        col = tile.col[0] + first
        _assume_vectors(c, col)
        for i, j, x in T.Parallel(acc.shape[0], acc.shape[1] // width, width):
            if tile.row[0] + i < c.shape[1] and col + j * width < c.shape[2]:
                acc[i, j * width + x] += T.cast(c[tile.group[0], tile.row[0] + i, col + j * width + x], "float32")


@T.macro
def _write(to: Results, tile: Tile, acc: T.Buffer, first: T.PrimExpr) -> None:
    d = to.d
    width = 128 // d.dtype.bits
    col = tile.col[0] + first
    _assume_vectors(d, col)
    for i, j, x in T.Parallel(acc.shape[0], acc.shape[1] // width, width):
        is_row = tile.row[0] + i < (tile.end[0] if to.kind == "masked" else d.shape[1])
        if is_row and col + j * width < d.shape[2]:
            d[tile.group[0], tile.row[0] + i, col + j * width + x] = acc[i, j * width + x]


@T.macro
def _assume_vectors(x: T.Buffer, col: T.PrimExpr) -> None:
    # So that 16 bytes are read or written at a time: rows and columns of a piece begin on 16 bytes.
    width = 128 // x.dtype.bits
    T.assume(col % width == 0)
    T.assume(x.strides[0] % width == 0)
    T.assume(x.strides[1] % width == 0)
