"""A tile's end: C is added, padding becomes zero, and TMA writes the results to D or adds them to it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import tilelang.language as T
import torch

from tk_gemm import scheduler
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BLOCK_K, Kind
from tk_gemm.scheduler import Scheduler, Tile, local_int

_STORE_BARRIER = 4
"""The first named barrier of the multiplying warpgroups; TileLang takes 1 to 3 itself."""


class HandedOver(NamedTuple):
    """Results in shared memory on their way to a warp that adds them to D: barriers of each warpgroup and buffer."""

    out: T.Buffer
    full: T.Buffer
    empty: T.Buffer
    parity: T.Buffer  # int32 (1), of the round, in a warp or warpgroup


class Epilogue(NamedTuple):
    """A warpgroup's share of results: 64 rows of a tile, and all or half of its columns."""

    kind: Kind
    warpgroup: int
    corner: tuple[int, int]  # its first row and column within the tile
    out: T.Buffer  # (buffers, 64 · warpgroups, columns of a piece) in shared memory
    num_pieces: int  # of a tile
    c: "T.Buffer | None"  # (G, M, N), which threads add
    sums: "HandedOver | None"  # where the results are added to D, by warps of their own
    d: T.Buffer  # (G, M, N)
    is_row: "T.Buffer | None"  # int32 (64), which rows are a group's: others become zero, whatever their products are


def out_shape(shape: TileShape, dtype: torch.dtype) -> tuple[int, int, int]:
    """Shape of results in shared memory: pieces of at most 128 bytes of a row, in as many buffers, or two, or one."""
    piece = min(shape.warpgroup_n, 128 // dtype.itemsize)
    buffer = 64 * shape.num_warpgroups * piece * dtype.itemsize
    ring = shape.num_stages * (BLOCK_K * (shape.block_m + shape.block_n) + 4 * shape.block_m)
    room = (226 * 1024 - ring) // buffer
    num_pieces = shape.warpgroup_n // piece
    return num_pieces if num_pieces <= room else min(2, room), 64 * shape.num_warpgroups, piece


def handed_over(shape: TileShape, out: T.Buffer) -> HandedOver:
    """Empty buffers."""
    count = shape.num_warpgroups * int(out.shape[0])
    return HandedOver(out, T.alloc_barrier([128] * count), T.alloc_barrier([32] * count), local_int())


def adding_warps(shape: TileShape, sums: HandedOver, d: T.Buffer) -> list[Callable[[Scheduler], None]]:
    """What a warp for each multiplying warpgroup does."""
    return [partial(_add_to_d, shape=shape, warpgroup=w, sums=sums, d=d) for w in range(shape.num_warpgroups)]


@T.macro
def _add_to_d(s: Scheduler, shape: TileShape, warpgroup: int, sums: HandedOver, d: T.Buffer) -> None:
    """Add a multiplying warpgroup's results to D by TMA, piece by piece, of one tile after another.

    TMA's additions are rounded to the nearest as others, but subnormal addends and results become zero.
    """
    size = int(sums.out.shape[2])
    rows = slice(warpgroup * 64, warpgroup * 64 + 64)
    while s.index[0] < s.total[0]:
        row = s.tile.row[0] + shape.corner(warpgroup)[0]
        col = s.tile.col[0] + shape.corner(warpgroup)[1]
        for x in range(shape.warpgroup_n // size):
            buffer = x % int(sums.out.shape[0])
            barrier = warpgroup * int(sums.out.shape[0]) + buffer
            T.mbarrier_wait_parity(sums.full[barrier], sums.parity[0])
            target = d[s.tile.group[0], row : row + 64, col + x * size : col + x * size + size]
            T.atomic_add(target, sums.out[buffer, rows, :], use_tma=True)  # Waits until TMA has read them.
            T.mbarrier_arrive(sums.empty[barrier])
            if buffer == int(sums.out.shape[0]) - 1:
                sums.parity[0] = sums.parity[0] ^ 1
        scheduler.next_tile(s)


def epilogue(
    warpgroup: int,
    shape: TileShape,
    kind: Kind,
    out: T.Buffer,
    d: T.Buffer,
    c: "T.Buffer | None" = None,
    sums: "HandedOver | None" = None,
) -> Epilogue:
    """A multiplying warpgroup's epilogue."""
    is_row = T.alloc_fragment((64,), "int32") if kind in ("ids", "psum") else None
    num_pieces = shape.warpgroup_n // int(out.shape[2])
    return Epilogue(kind, warpgroup, shape.corner(warpgroup), out, num_pieces, c, sums, d, is_row)


@T.macro
def find_rows(e: Epilogue, layout: T.Buffer, tile: Tile) -> None:
    """Set is_row for a tile."""
    if e.is_row is not None:
        scheduler.find_rows(e.kind, layout, tile, e.corner[0], e.d.shape[1], e.is_row)


@T.macro
def store(e: Epilogue, tile: Tile, acc: T.Buffer, first: int) -> None:
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
            _store_by_tma(e, tile, acc, first, row, col)
    elif e.sums is not None:
        _hand_over(e, acc, first)
    else:
        _store_by_tma(e, tile, acc, first, row, col)


@T.macro
def _hand_over(e: Epilogue, acc: T.Buffer, first: int) -> None:
    num_buffers, _, size = (int(x) for x in e.out.shape)
    for x in range(int(acc.shape[1]) // size):
        buffer = (first // size + x) % num_buffers
        barrier = e.warpgroup * num_buffers + buffer
        T.mbarrier_wait_parity(e.sums.empty[barrier], e.sums.parity[0] ^ 1)
        T.copy(acc[:, x * size : x * size + size], e.out[buffer, e.warpgroup * 64 : e.warpgroup * 64 + 64, :])
        T.fence_proxy_async()
        T.mbarrier_arrive(e.sums.full[barrier])
        if buffer == num_buffers - 1:
            e.sums.parity[0] = e.sums.parity[0] ^ 1


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
def _store_by_tma(e: Epilogue, tile: Tile, acc: T.Buffer, first: int, row: T.PrimExpr, col: T.PrimExpr) -> None:
    num_buffers, _, size = (int(x) for x in e.out.shape)
    rows = slice(e.warpgroup * 64, e.warpgroup * 64 + 64)
    if e.num_pieces % num_buffers != 0 and first == 0:  # The last piece is where the next tile's first one will be.
        T.tma_store_wait(0)
    for x in range(int(acc.shape[1]) // size):
        buffer = (first // size + x) % num_buffers
        T.tma_store_wait(num_buffers - 1)
        T.sync_threads(_STORE_BARRIER + e.warpgroup, 128)
        T.copy(acc[:, x * size : x * size + size], e.out[buffer, rows, :])
        T.fence_proxy_async()
        T.sync_threads(_STORE_BARRIER + e.warpgroup, 128)
        target = e.d[tile.group[0], row : row + 64, col + x * size : col + x * size + size]
        T.tma_copy(e.out[buffer, rows, :], target, leader_scope_threads=128)
