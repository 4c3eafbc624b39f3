"""Which tiles of D a thread block computes, and how their coordinates reach the warps that multiply.

Thread block b takes tiles b, b + num_blocks, …, or after its first, on demand, the next that no block has taken: tiles
side by side, which share weights, then begin together and find each other's loads in L2.

On Blackwell all warps look for tiles. On Hopper only those that fill the ring do: one sends a tile's coordinates with
the tile's first stage, and a negative row behind the last tile.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring, local_int
from tk_gemm.kernels import Kind

STRIP, SHORT_STRIP = 8, 2
"""Height of a strip in units of 128 rows, and on demand; a strip's tiles are taken one column after the other."""

_GROUP_ROWS = 128
"""Groups of rows, and of channels, begin at multiples of this."""
_WORD_CHANNELS = 512
"""Channels whose packed factors are a word."""


class Tile(NamedTuple):
    """Coordinates of a tile, each an int32 (1) in registers."""

    row: T.Buffer  # its first row; negative behind the last tile
    col: T.Buffer  # its first column
    group: T.Buffer  # group of A, C and D
    weights: T.Buffer  # group of B; negative where the rows have none
    end: T.Buffer  # row at which the group's rows end: of "psum" and "masked"
    first_step: T.Buffer  # where the group begins along K, in steps: of "k"
    num_steps: T.Buffer  # steps of K


class Demand(NamedTuple):
    """How tiles are taken on demand: the last warp that fills the ring asks for one, and tells the others."""

    taken: T.Buffer  # int32 (1) in global memory: tiles that were taken, besides each block's first
    told: T.Buffer  # int32 (stages) in shared memory
    ring: Ring
    asking_warp: int


class Scheduler(NamedTuple):
    """The search for a thread block's next tile, in a warp."""

    kind: Kind
    layout: T.Buffer  # int32: a group for each row, where groups end, or rows of each group
    m: T.PrimExpr
    n: T.PrimExpr
    k: T.PrimExpr
    num_groups: T.PrimExpr  # of B; of "masked" also of A
    block_m: int
    block_n: int
    step_k: int
    num_blocks: T.PrimExpr
    index: T.Buffer  # int32 (1), the tile's number
    total: T.Buffer  # int32 (1), tiles of D
    cursor: T.Buffer  # int32 (1), with "masked" the group that the search has reached
    before: T.Buffer  # int32 (1), with "masked" the tiles of earlier groups
    tile: Tile
    demand: Demand | None


def local_tile() -> Tile:
    """Coordinates in registers, 0."""
    return Tile(*(local_int() for _ in Tile._fields))


def demand(taken: T.Buffer, num_warps: int, first_warp: int) -> Demand:
    """Tiles on demand for num_warps warps that look for them, from the thread block's warp first_warp on."""
    told = T.alloc_shared((2,), "int32", scope="shared")
    return Demand(taken, told, ring.ring(2, 1, num_warps - 1), first_warp + num_warps - 1)


def scheduler(
    kind: Kind,
    layout: T.Buffer,
    sizes: tuple[T.PrimExpr, ...],
    tile_shape: tuple[int, int, int],
    num_blocks: T.PrimExpr,
    demand: Demand | None = None,
) -> Scheduler:
    """A scheduler for sizes (M, N, K, groups of B) and tiles of (rows, columns, channels of a step)."""
    counters = (local_int() for _ in range(4))
    return Scheduler(kind, layout, *sizes, *tile_shape, num_blocks, *counters, local_tile(), demand)


def group_end(end: T.PrimExpr, k: T.PrimExpr) -> T.PrimExpr:
    """Where the group after one that ends at `end` begins along K, a multiple of 128."""
    return T.ceildiv(T.max(T.min(end, k), 0), _GROUP_ROWS) * _GROUP_ROWS


@T.macro
def start(s: Scheduler, block: T.PrimExpr) -> None:
    """Find the thread block's first tile."""
    num_m = T.ceildiv(s.m, s.block_m)
    num_n = T.ceildiv(s.n, s.block_n)
    if s.kind == "masked":
        for group in T.serial(s.num_groups):
            s.total[0] += T.ceildiv(T.max(T.min(s.layout[group], s.m), 0), s.block_m)
        s.total[0] = s.total[0] * num_n
    elif s.kind == "k":
        s.total[0] = num_m * num_n * s.layout.shape[0]
    else:
        s.total[0] = num_m * num_n
    s.tile.num_steps[0] = T.ceildiv(s.k, s.step_k)
    s.index[0] = block
    _find_with_weights(s)


@T.macro
def next_tile(s: Scheduler) -> None:
    """Find the thread block's next tile; s.index ≥ s.total if there is none."""
    _advance(s)
    _find_with_weights(s)


@T.macro
def _advance(s: Scheduler) -> None:
    d, thread = s.demand, T.get_thread_binding()
    if d is None:
        s.index[0] += s.num_blocks
    elif thread // 32 == d.asking_warp:
        stage = ring.wait_empty(d.ring)
        if thread % 32 == 0:
            s.index[0] = s.num_blocks + T.atomic_add(d.taken[0], 1, return_prev=True)
            d.told[stage] = s.index[0]
        s.index[0] = T.shfl_sync(s.index[0], 0)
        ring.fill(d.ring)
    else:
        ring.wait_full(d.ring)
        s.index[0] = d.told[d.ring.stage[0]]
        ring.release(d.ring, d.ring.stage[0])
        ring.move_on(d.ring)


@T.macro
def _find_with_weights(s: Scheduler) -> None:
    if s.index[0] < s.total[0]:
        _find(s)
    if s.kind == "ids" or s.kind == "psum":
        while s.index[0] < s.total[0] and s.tile.weights[0] < 0:
            _advance(s)
            if s.index[0] < s.total[0]:
                _find(s)


@T.macro
def _find(s: Scheduler) -> None:
    if s.kind == "masked":
        _find_masked(s)
    elif s.kind == "k":
        tiles_of_group = T.ceildiv(s.m, s.block_m) * T.ceildiv(s.n, s.block_n)
        _find_in_strips(s, T.truncmod(s.index[0], tiles_of_group))
        _find_range(s, T.truncdiv(s.index[0], tiles_of_group))
    else:
        _find_in_strips(s, s.index[0])
        if s.kind == "ids":
            s.tile.weights[0] = s.layout[s.tile.row[0] // _GROUP_ROWS * _GROUP_ROWS]  # 64 rows may be all padding.
        elif s.kind == "psum":
            _find_group(s)


@T.macro
def _find_in_strips(s: Scheduler, index: T.PrimExpr) -> None:
    # Strips of rows, one column of tiles after the other, so that their rows stay in L2.
    strip, inner, height = (T.alloc_var("int32") for _ in range(3))
    strip_size = (STRIP if s.demand is None else SHORT_STRIP) * 128 // s.block_m
    num_n = T.ceildiv(s.n, s.block_n)
    strip = T.truncdiv(index, strip_size * num_n)
    inner = T.truncmod(index, strip_size * num_n)
    height = T.min(strip_size, T.ceildiv(s.m, s.block_m) - strip * strip_size)
    s.tile.row[0] = (strip * strip_size + T.truncmod(inner, height)) * s.block_m
    s.tile.col[0] = T.truncdiv(inner, height) * s.block_n


@T.macro
def _find_masked(s: Scheduler) -> None:
    # Tiles come in ascending order, so the search resumes where it stopped.
    count, num_m = T.alloc_var("int32"), T.alloc_var("int32")
    num_n = T.ceildiv(s.n, s.block_n)
    count = T.max(T.min(s.layout[s.cursor[0]], s.m), 0)
    num_m = T.ceildiv(count, s.block_m)
    while s.index[0] >= s.before[0] + num_m * num_n:
        s.before[0] += num_m * num_n
        s.cursor[0] += 1
        count = T.max(T.min(s.layout[s.cursor[0]], s.m), 0)
        num_m = T.ceildiv(count, s.block_m)
    s.tile.row[0] = T.truncmod(s.index[0] - s.before[0], num_m) * s.block_m
    s.tile.col[0] = T.truncdiv(s.index[0] - s.before[0], num_m) * s.block_n
    s.tile.group[0] = s.cursor[0]
    s.tile.weights[0] = s.cursor[0]
    s.tile.end[0] = count


@T.macro
def _find_group(s: Scheduler) -> None:
    # The first group that ends after the first of the 128 rows that have the tile; empty groups end where they begin.
    low, high = T.alloc_var("int32"), T.alloc_var("int32")
    low = 0
    high = s.num_groups
    while low < high:
        middle = (low + high) >> 1
        if s.layout[middle] > s.tile.row[0] // _GROUP_ROWS * _GROUP_ROWS:
            high = middle
        else:
            low = middle + 1
    s.tile.weights[0] = -1
    if low < s.num_groups:
        s.tile.weights[0] = low
        s.tile.end[0] = s.layout[low]


@T.macro
def _find_range(s: Scheduler, group: T.PrimExpr) -> None:
    # A group without channels has one step past the last, of which TMA loads zeros. It is also past the last word of
    # packed factors, which may have any bytes behind those of the last step, such as NaN: 0 · NaN would be NaN.
    first, end = T.alloc_var("int32"), T.alloc_var("int32")
    first = 0
    if group > 0:
        first = group_end(s.layout[group - 1], s.k)
    end = group_end(s.layout[group], s.k)
    if end <= first:
        first = T.ceildiv(s.k, _WORD_CHANNELS) * _WORD_CHANNELS
        end = first + s.step_k
    s.tile.group[0] = group
    s.tile.first_step[0] = T.truncdiv(first, s.step_k)
    s.tile.num_steps[0] = T.truncdiv(end - first, s.step_k)


@T.macro
def find_rows(kind: Kind, layout: T.Buffer, tile: Tile, first: T.PrimExpr, m: T.PrimExpr, is_row: T.Buffer) -> None:
    """is_row = which rows of a tile, from its row `first` on, are a group's: the others' results are zero."""
    for i in T.Parallel(*is_row.shape):
        row = tile.row[0] + first + i
        if kind == "ids":
            is_row[i] = T.cast(layout[T.min(row, m - 1)] >= 0, "int32")
        else:
            is_row[i] = T.cast(row < tile.end[0], "int32")


@T.macro
def send_tiles(r: Ring, s: Scheduler, sent: T.Buffer) -> None:
    """In the writing warp, where it has nothing else to write: put tiles' coordinates into the stages, and the end."""
    while s.index[0] < s.total[0]:
        for step in T.serial(s.tile.num_steps[0]):
            ring.wait_empty(r)
            if step == 0 and T.shuffle_elect(32):
                ring.send(s.tile, sent, r.stage[0])
            ring.fill(r)
        next_tile(s)
    send_end(r, s, sent)


@T.macro
def send_end(r: Ring, s: Scheduler, sent: T.Buffer) -> None:
    """Put the end into the stage behind the last tile."""
    s.tile.row[0] = -1
    ring.wait_empty(r)
    if T.shuffle_elect(32):
        ring.send(s.tile, sent, r.stage[0])
    ring.fill(r)
