"""A tile's way through K in FP8: the tensor core sums 128 channels, then acc = fma(factor, sum, acc) in float32.

in turn    more than 128 columns: registers for one product beside the sums, so each is awaited and added before the
           next begins, and the other warpgroup's products run meanwhile
ahead      at most 128 columns: a step's product begins before the one before it is added
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring
from tk_gemm import scheduler
from tk_gemm.device import tensor_maps
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BLOCK_K
from tk_gemm.scheduler import Scheduler, Tile

_LANES = 32


class Operands(NamedTuple):
    """What is multiplied, in global memory. With groups along K, A and B are one group, and b_sf is as a_sf."""

    a: T.Buffer  # e4m3 (groups, M, K)
    a_sf: T.Buffer  # float32 (groups, steps, M)
    b: T.Buffer  # e4m3 (groups, N, K)
    b_sf: T.Buffer  # float32, flat (groups, ⌈N/128⌉, steps)
    a_sf_by_tma: bool
    by_k: bool  # groups are ranges of K, and B has factors for each row
    is_flat: bool = False  # A and B are tensor maps of the groups, int64 (groups, 16)


class Stages(NamedTuple):
    """The stages of the ring in shared memory; the first dimension is the stage."""

    a: T.Buffer  # e4m3 (stages, block_m, 128)
    b: T.Buffer  # e4m3 (stages, block_n, 128)
    a_sf: T.Buffer  # float32 (stages, block_m), where it comes by TMA
    b_sf: T.Buffer  # float32 (stages, factors of the columns)
    tile: T.Buffer  # int32 (stages, fields of Tile)


class Share(NamedTuple):
    """What a warpgroup multiplies of each step."""

    shape: TileShape
    corner: tuple[int, int]  # its first row and column
    x: Operands
    stages: Stages
    ring: Ring
    row_sf: T.Buffer  # float32 (64), a step's factors of the rows
    col_sf: T.Buffer  # float32 (factors), a step's factors of the columns


def stages(shape: TileShape, by_k: bool) -> Stages:
    """The stages of a tile's operands."""
    count = shape.num_stages
    small = partial(T.alloc_shared, scope="shared")  # Static: dynamic shared memory is handed out in units of 1 KiB.
    return Stages(
        T.alloc_shared((count, shape.block_m, BLOCK_K), "float8_e4m3fn"),
        T.alloc_shared((count, shape.block_n, BLOCK_K), "float8_e4m3fn"),
        T.alloc_shared((count, shape.block_m), "float32"),
        T.alloc_shared((count, shape.block_n), "float32") if by_k else small((count, shape.num_factors), "float32"),
        small((count, len(Tile._fields)), "int32"),
    )


def share(warpgroup: int, shape: TileShape, x: Operands, stages: Stages, r: Ring) -> Share:
    """A multiplying warpgroup's share."""
    row_sf, col_sf = T.alloc_fragment((64,), "float32"), T.alloc_local((shape.num_factors,), "float32")
    return Share(shape, shape.corner(warpgroup), x, stages, r, row_sf, col_sf)


@T.macro
def load(s: Scheduler, shape: TileShape, x: Operands, to: Stages, r: Ring, sides: str) -> None:
    """In a loading warp: load "a", "b" or "ab", with the factors that come by TMA, for one tile after the other."""
    acquired = T.alloc_var("int32", init=-1) if x.is_flat else None  # The group whose maps were acquired last.
    while s.index[0] < s.total[0]:
        if x.is_flat and s.tile.group[0] != acquired:
            acquired = s.tile.group[0]
            for side in sides:
                tensor_maps.acquire(getattr(x, side)[acquired, :])
        for index in T.serial(s.tile.num_steps[0]):
            step = s.tile.first_step[0] + index
            group = 0 if x.by_k else s.tile.group[0]
            rows = slice(s.tile.row[0], s.tile.row[0] + shape.block_m)
            loaded = slice(s.tile.row[0], s.tile.row[0] + shape.loaded_m)
            cols = slice(s.tile.col[0], s.tile.col[0] + shape.block_n)
            channels = slice(step * BLOCK_K, (step + 1) * BLOCK_K)
            stage = ring.wait_empty(r)
            if "a" in sides:
                if x.a_sf_by_tma:
                    ring.load(r, x.a_sf[group, step, rows], to.a_sf[stage, :])
                if x.is_flat:
                    tensor_maps.load(r, x.a[s.tile.group[0], :], rows, channels, to.a[stage, :, :])
                else:
                    ring.load(r, x.a[group, loaded, channels], to.a[stage, : shape.loaded_m, :])
            if "b" in sides:
                if x.by_k:
                    ring.load(r, x.b_sf[0, step, cols], to.b_sf[stage, :])
                if x.is_flat:
                    tensor_maps.load(r, x.b[s.tile.group[0], :], cols, channels, to.b[stage, :, :])
                else:
                    ring.load(r, x.b[s.tile.weights[0], cols, channels], to.b[stage, :, :])
            ring.fill(r)
        scheduler.next_tile(s)
    ring.wait_empty(r)
    ring.fill(r)


@T.macro
def write(s: Scheduler, shape: TileShape, x: Operands, to: Stages, r: Ring) -> None:
    """In the writing warp: write tiles' coordinates, the end's too, and the factors of B's blocks.

    A warp of its own, as TMA would have to wait for what its own warp writes to shared memory.
    """
    begin = T.alloc_local((shape.num_factors,), "int32")  # Where the factors of each block of columns begin.
    factors = T.alloc_local((shape.num_factors,), "float32")  # Those of the lane's step, of 32 steps.
    factor = T.alloc_local((shape.num_factors,), "float32")  # Those of the step.
    num_col_blocks = T.ceildiv(s.n, 128)
    while s.index[0] < s.total[0]:
        for f in T.unroll(shape.num_factors):
            block = T.min((s.tile.col[0] + f * shape.factor_n) // 128, num_col_blocks - 1)
            begin[f] = (s.tile.weights[0] * num_col_blocks + block) * s.tile.num_steps[0]
        for step in T.serial(s.tile.num_steps[0]):
            if not x.by_k:
                if step % _LANES == 0:
                    for f in T.unroll(shape.num_factors):
                        own = T.min(step + T.get_thread_binding() % _LANES, s.tile.num_steps[0] - 1)
                        factors[f] = x.b_sf[begin[f] + own]
                # Into registers first: TileLang would move the shuffle into the branch, where a lane shuffles alone.
                for f in T.unroll(shape.num_factors):
                    factor[f] = T.shfl_sync(factors[f], step % _LANES)
            ring.wait_empty(r)
            if T.shuffle_elect(_LANES):
                if not x.by_k:
                    for f in T.unroll(shape.num_factors):
                        to.b_sf[r.stage[0], f] = factor[f]
                if step == 0:
                    ring.send(s.tile, to.tile, r.stage[0])
            ring.fill(r)
        scheduler.next_tile(s)
    scheduler.send_end(r, s, to.tile)


@T.macro
def sum_in_turn(
    s: Share, tile: Tile, part: T.Buffer, sums: Sequence[T.Buffer], at_last_product: Callable[[], None] | None
) -> None:
    """Each of `sums`, the warpgroup's columns side by side, = Σ over K; at_last_product() runs when all but one are.

    The tile's first stage is full. With groups along K, a step ends with the next one's first product.
    """
    for acc in sums:
        T.clear(acc)
    if s.x.by_k:
        _multiply(s, s.ring.stage[0], 0, part)
    for step in T.serial(tile.num_steps[0] - 1):
        _add_in_turn(s, tile, step, part, sums, None)
        if s.x.by_k:
            _multiply(s, s.ring.stage[0], 0, part)
    _add_in_turn(s, tile, tile.num_steps[0] - 1, part, sums, at_last_product)


@T.macro
def _add_in_turn(
    s: Share,
    tile: Tile,
    step: T.PrimExpr,
    part: T.Buffer,
    sums: Sequence[T.Buffer],
    at_last_product: Callable[[], None] | None,
) -> None:
    stage = T.alloc_var("int32")
    width = int(part.shape[1])
    stage = s.ring.stage[0]
    # Before the first of two products, so that the second one's descriptors are ready when it may begin.
    reads_first = len(sums) > 1
    if reads_first:
        _read_factors(s, tile, stage, step)
    for x, acc in enumerate(sums):
        if x > 0 or not s.x.by_k:
            _multiply(s, stage, x * width, part)
        if x == 0 and not reads_first:
            _read_factors(s, tile, stage, step)
        if x < len(sums) - 1:
            T.wait_wgmma(0)
            _add(s, stage, part, x * width, acc)
        else:
            if x > 0 and at_last_product is not None:
                at_last_product()
            T.wait_wgmma(0)
            ring.move_on(s.ring)  # Behind the last step's is a stage too: the next tile's, or the end.
            _end_step(s, stage, part, x * width, acc)


@T.macro
def sum_ahead(s: Share, tile: Tile, even: T.Buffer, odd: T.Buffer, acc: T.Buffer) -> None:
    """acc = Σ over K; even and odd have products of even and odd steps. The tile's first stage is full.

    Two steps at a time, and two ends: where ptxas can't tell which registers are being written, every product waits for
    the one before (tests/hopper/test_machine_code.py).
    """
    last = T.alloc_local((1,), "int32")  # The stage of the last product that was issued.
    num_steps = tile.num_steps[0]
    T.clear(acc)
    _issue(s, last, even)
    ring.wait_full(s.ring)
    for pair in T.serial(T.truncdiv(num_steps - 1, 2)):
        _issue_and_add(s, tile, 2 * pair, last, odd, even, acc)
        _issue_and_add(s, tile, 2 * pair + 1, last, even, odd, acc)
    if num_steps % 2 == 0:
        _issue_and_add(s, tile, num_steps - 2, last, odd, even, acc)
        _add_last(s, tile, num_steps - 1, last, odd, acc)
    else:
        _add_last(s, tile, num_steps - 1, last, even, acc)


@T.macro
def _issue(s: Share, last: T.Buffer, part: T.Buffer) -> None:
    _multiply(s, s.ring.stage[0], 0, part)
    last[0] = s.ring.stage[0]
    ring.move_on(s.ring)


@T.macro
def _issue_and_add(
    s: Share, tile: Tile, step: T.PrimExpr, last: T.Buffer, following: T.Buffer, part: T.Buffer, acc: T.Buffer
) -> None:
    # Begin the step after this one, then add this one.
    stage = T.alloc_var("int32")
    stage = last[0]
    _read_factors(s, tile, stage, step)
    _issue(s, last, following)
    T.wait_wgmma(1)
    _end_step(s, stage, part, 0, acc)


@T.macro
def _add_last(s: Share, tile: Tile, step: T.PrimExpr, last: T.Buffer, part: T.Buffer, acc: T.Buffer) -> None:
    _read_factors(s, tile, last[0], step)
    T.wait_wgmma(0)
    _end_step(s, last[0], part, 0, acc)


@T.macro
def _end_step(s: Share, stage: T.PrimExpr, part: T.Buffer, first: int, acc: T.Buffer) -> None:
    """Add a step's last product and release the step's stage, while the next stage fills."""
    if s.x.by_k:
        ring.while_filling(s.ring, partial(_add_and_release, s, stage, part, first, acc))
    else:
        ring.release(s.ring, stage)
        ring.while_filling(s.ring, partial(_add, s, stage, part, first, acc))


@T.macro
def _add_and_release(s: Share, stage: T.PrimExpr, part: T.Buffer, first: int, acc: T.Buffer) -> None:
    # The columns' factors are read while they are used: there are no registers for 128 of them.
    _add(s, stage, part, first, acc)
    T.fence_proxy_async()  # Else TMA may overwrite what is still to be read.
    ring.release(s.ring, stage)


@T.macro
def _multiply(s: Share, stage: T.PrimExpr, first: T.PrimExpr, part: T.Buffer) -> None:
    """Begin part = a step's product with the warpgroup's columns from `first` on."""
    row, col = s.corner
    T.wgmma_gemm(
        s.stages.a[stage, row : row + 64, :],
        s.stages.b[stage, col + first : col + first + part.shape[1], :],
        part,
        transpose_B=True,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=True,
    )


@T.macro
def _read_factors(s: Share, tile: Tile, stage: T.PrimExpr, step: T.PrimExpr) -> None:
    first = s.corner[0]
    if s.x.a_sf_by_tma:
        T.copy(s.stages.a_sf[stage, first : first + 64], s.row_sf)
    else:
        for i in T.Parallel(64):
            row = T.min(tile.row[0] + first + i, s.x.a_sf.shape[2] - 1)
            s.row_sf[i] = s.x.a_sf[tile.group[0], step, row]
    if not s.x.by_k:
        for f in T.unroll(s.shape.num_factors):
            s.col_sf[f] = s.stages.b_sf[stage, f]


@T.macro
def _add(s: Share, stage: T.PrimExpr, part: T.Buffer, first: int, acc: T.Buffer) -> None:
    """acc = fma(row's factor · column's factor, part, acc), of the warpgroup's columns from `first` on."""
    col = s.corner[1] + first
    for i, j in T.Parallel(*part.shape):
        if s.x.by_k:
            acc[i, j] = T.ieee_fmaf(s.row_sf[i] * s.stages.b_sf[stage, col + j], part[i, j], acc[i, j])
        else:
            acc[i, j] = T.ieee_fmaf(_scale(s, i, j, col, int(part.shape[1])), part[i, j], acc[i, j])


def _scale(s: Share, i: T.PrimExpr, j: T.PrimExpr, col: int, num_cols: int) -> T.PrimExpr:
    """The product of the factors of a row and of a column; which factor is known when the kernel is compiled."""
    size = s.shape.factor_n
    first, last = col // size, (col + num_cols - 1) // size
    scale = s.row_sf[i] * s.col_sf[first]
    for f in range(first + 1, last + 1):
        scale = T.if_then_else(col + j >= f * size, s.row_sf[i] * s.col_sf[f], scale)
    return scale
