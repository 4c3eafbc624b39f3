"""What a warpgroup does with a tile's sums: C is added, padding becomes zero, and results go to D by TMA."""

from typing import NamedTuple

import tilelang.language as T
import torch

from tk_gemm import scheduler
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BLOCK_K, Kind
from tk_gemm.scheduler import Tile

_STORE_BARRIER = 4
"""The first named barrier of the multiplying warpgroups; TileLang takes 1 to 3 itself."""


class Epilogue(NamedTuple):
    """A warpgroup's share of results: 64 rows of a tile, and all or half of its columns."""

    kind: Kind
    warpgroup: int
    corner: tuple[int, int]  # its first row and column within the tile
    out: T.Buffer  # (buffers, 64 · warpgroups, columns of a piece) in shared memory
    c: "T.Buffer | None"  # (G, M, N)
    d: T.Buffer  # (G, M, N)
    is_row: "T.Buffer | None"  # int32 (64), which rows are a group's: others become zero, whatever their products are


def out_shape(shape: TileShape, dtype: torch.dtype) -> tuple[int, int, int]:
    """Shape of results in shared memory: pieces of at most 128 bytes of a row, in two buffers if there are several."""
    piece = min(shape.warpgroup_n, 128 // dtype.itemsize)
    buffer = 64 * shape.num_warpgroups * piece * dtype.itemsize
    ring = shape.num_stages * (BLOCK_K * (shape.block_m + shape.block_n) + 4 * shape.block_m)
    two = shape.warpgroup_n > piece and ring + 2 * buffer + 1024 <= 227 * 1024
    return 2 if two else 1, 64 * shape.num_warpgroups, piece


def epilogue(
    warpgroup: int, shape: TileShape, kind: Kind, out: T.Buffer, c: "T.Buffer | None", d: T.Buffer
) -> Epilogue:
    """A multiplying warpgroup's epilogue."""
    is_row = T.alloc_fragment((64,), "int32") if kind in ("ids", "psum") else None
    return Epilogue(kind, warpgroup, shape.corner(warpgroup), out, c, d, is_row)


@T.macro
def find_rows(e: Epilogue, layout: T.Buffer, tile: Tile) -> None:
    """Set is_row for a tile."""
    if e.is_row is not None:
        scheduler.find_rows(e.kind, layout, tile, e.corner[0], e.d.shape[1], e.is_row)


@T.macro
def store(e: Epilogue, tile: Tile, acc: T.Buffer, first: T.PrimExpr) -> None:
    """Begin to write sums as the warpgroup's columns from `first` on, but no rows and columns past the last."""
    row = tile.row[0] + e.corner[0]
    col = tile.col[0] + e.corner[1] + first
    _finish(e, tile, acc, row, col)
    if e.kind == "masked":
        if row + 64 > tile.end[0]:  # Rows past masked_m must not be written, and TMA only clips at M_max.
            for i, j in T.Parallel(*acc.shape):
                if row + i < tile.end[0] and col + j < e.d.shape[2]:
                    e.d[tile.group[0], row + i, col + j] = acc[i, j]
        else:
            _store_by_tma(e, tile, acc, row, col)
    else:
        _store_by_tma(e, tile, acc, row, col)


@T.macro
def _finish(e: Epilogue, tile: Tile, acc: T.Buffer, row: T.PrimExpr, col: T.PrimExpr) -> None:
    if e.c is not None:
        for i, j in T.Parallel(*acc.shape):
            if row + i < e.c.shape[1] and col + j < e.c.shape[2]:
                acc[i, j] += T.cast(e.c[tile.group[0], row + i, col + j], "float32")
    if e.is_row is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = T.if_then_else(e.is_row[i] != 0, acc[i, j], T.float32(0))


@T.macro
def _store_by_tma(e: Epilogue, tile: Tile, acc: T.Buffer, row: T.PrimExpr, col: T.PrimExpr) -> None:
    size = e.out.shape[2]
    rows = slice(e.warpgroup * 64, e.warpgroup * 64 + 64)
    num_pieces = acc.shape[1] // size
    num_buffers = e.out.shape[0]
    if num_pieces % 2 == 1:  # An odd number of pieces ends in the buffer that the next tile begins with.
        T.tma_store_wait(0)
    for x in T.unroll(num_pieces):
        T.tma_store_wait(int(num_buffers) - 1)
        T.sync_threads(_STORE_BARRIER + e.warpgroup, 128)
        T.copy(acc[:, x * size : x * size + size], e.out[x % num_buffers, rows, :])
        T.fence_proxy_async()
        T.sync_threads(_STORE_BARRIER + e.warpgroup, 128)
        target = e.d[tile.group[0], row : row + 64, col + x * size : col + x * size + size]
        T.tma_copy(e.out[x % num_buffers, rows, :], target, leader_scope_threads=128)
