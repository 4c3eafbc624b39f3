"""Steps of the FP8 products' kernels: which tile is next, and what is done with one. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_config import BLOCK_K, STRIP

ROW, COL, A_GROUP, B_GROUP, NUM_ROWS, CURSOR, TILES_BEFORE = range(7)
"""Elements of a tile's place: first row and column; group of A, C and D, and of B (-1: skip the tile); with "psum" and
"masked" the rows that count; with "masked" the group that the search has reached, and the tiles of groups before it."""
PLACE_SIZE = 7

_STORE_BARRIER = 4
"""The first named barrier of the multiplying warpgroups; TileLang takes 1 to 3 itself."""


def stride(name: str) -> Any:
    """A stride known at run time, of 64 bits: rows may be 2³¹ elements apart, and groups of rows are."""
    return T.dynamic(name, "int64")


def strides(name: str) -> tuple[Any, Any]:
    """Strides of a tensor's groups and rows, known at run time."""
    return stride(f"{name}_group_stride"), stride(f"{name}_stride")


@T.macro
def num_tiles(kind: Any, layout: Any, m: Any, n: Any, num_groups: Any, block_m: Any, block_n: Any, total: Any) -> None:
    """total[0] = number of tiles of D."""
    total[0] = T.ceildiv(m, block_m)
    if kind == "masked":
        total[0] = 0
        for group in T.serial(num_groups):
            total[0] += T.ceildiv(T.max(T.min(layout[group], m), 0), block_m)
    total[0] = total[0] * T.ceildiv(n, block_n)


@T.macro
def _find_masked(tile: Any, layout: Any, m: Any, num_n: Any, block_m: Any, block_n: Any, place: Any) -> None:
    # Tiles come in ascending order, so the search resumes where it stopped.
    count = T.alloc_var("int32")
    num_m = T.alloc_var("int32")
    count = T.max(T.min(layout[place[CURSOR]], m), 0)
    num_m = T.ceildiv(count, block_m)
    while tile >= place[TILES_BEFORE] + num_m * num_n:
        place[TILES_BEFORE] += num_m * num_n
        place[CURSOR] += 1
        count = T.max(T.min(layout[place[CURSOR]], m), 0)
        num_m = T.ceildiv(count, block_m)
    place[ROW] = T.truncmod(tile - place[TILES_BEFORE], num_m) * block_m
    place[COL] = T.truncdiv(tile - place[TILES_BEFORE], num_m) * block_n
    place[A_GROUP] = place[CURSOR]
    place[B_GROUP] = place[CURSOR]
    place[NUM_ROWS] = count - place[ROW]


@T.macro
def _find_psum(layout: Any, num_groups: Any, place: Any) -> None:
    # The first group that ends after the first of the 128 rows that have the tile; empty groups end where they begin.
    low = T.alloc_var("int32", init=0)
    high = T.alloc_var("int32")
    low = 0
    high = num_groups
    while low < high:
        middle = (low + high) >> 1
        if layout[middle] > place[ROW] // 128 * 128:
            high = middle
        else:
            low = middle + 1
    place[B_GROUP] = -1
    if low < num_groups:
        place[B_GROUP] = low
        place[NUM_ROWS] = layout[low] - place[ROW]


@T.macro
def _find_tile(
    kind: Any,
    tile: Any,
    layout: Any,
    m: Any,
    n: Any,
    num_groups: Any,
    block_m: Any,
    block_n: Any,
    place: Any,
) -> None:
    # Strips of STRIP · 128 rows, one column of tiles after the other, so that their rows stay in L2.
    num_n = T.ceildiv(n, block_n)
    if kind == "masked":
        _find_masked(tile, layout, m, num_n, block_m, block_n, place)
    else:
        strip_size = STRIP * 128 // block_m
        strip = T.truncdiv(tile, strip_size * num_n)
        inner = T.truncmod(tile, strip_size * num_n)
        num_m = T.min(strip_size, T.ceildiv(m, block_m) - strip * strip_size)
        place[ROW] = (strip * strip_size + T.truncmod(inner, num_m)) * block_m
        place[COL] = T.truncdiv(inner, num_m) * block_n
        place[A_GROUP] = 0
        place[B_GROUP] = 0
        if kind == "ids":
            place[B_GROUP] = layout[place[ROW] // 128 * 128]  # A tile of 64 rows may be all padding: still zeroed.
        elif kind == "psum":
            _find_psum(layout, num_groups, place)


@T.macro
def find_tile(
    kind: Any,
    tile: Any,
    num_blocks: Any,
    total: Any,
    layout: Any,
    m: Any,
    n: Any,
    num_groups: Any,
    block_m: Any,
    block_n: Any,
    place: Any,
) -> None:
    """place = that of the thread block's next tile with weights, from tile[0] on; tile[0] ≥ total if there is none."""
    if tile[0] < total:
        _find_tile(kind, tile[0], layout, m, n, num_groups, block_m, block_n, place)
    if kind == "ids" or kind == "psum":
        while tile[0] < total and place[B_GROUP] < 0:
            tile[0] = tile[0] + num_blocks
            if tile[0] < total:
                _find_tile(kind, tile[0], layout, m, n, num_groups, block_m, block_n, place)


@T.macro
def next_slot(slot: Any, num_stages: Any) -> None:
    """Move on slot = [stage of the ring, parity of the round]."""
    slot[0] += 1
    if slot[0] == num_stages:
        slot[0] = 0
        slot[1] = slot[1] ^ 1


@T.macro
def release(empty: Any, stage: Any) -> None:
    """Give a stage back to the loading warp."""
    if T.shuffle_elect(32):
        T.mbarrier_arrive(empty[stage])


@T.macro
def load_row_factors(a_sf: Any, tile: Any, full: Any, slot: Any, place: Any, step: Any) -> None:
    """Begin to load a step's factors of A's rows."""
    rows = a_sf[place[A_GROUP], step, place[ROW] : place[ROW] + tile.shape[1]]
    T.tma_copy(rows, tile[slot, :], barrier=full[slot], leader_scope_threads=32)


@T.macro
def load(a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, slot: Any, place: Any, step: Any) -> None:
    """Begin to load a step's operands, and arrive at its barrier: its other loads must come before."""
    channel = step * BLOCK_K
    rows = a[place[A_GROUP], place[ROW] : place[ROW] + a_tile.shape[1], channel : channel + BLOCK_K]
    T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    cols = b[place[B_GROUP], place[COL] : place[COL] + b_tile.shape[1], channel : channel + BLOCK_K]
    T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if T.shuffle_elect(32):
        T.mbarrier_arrive(full[slot])


@T.macro
def load_tiles(operands: Any, tiles: Any, ring: Any, search: Any, num_steps: Any) -> None:
    """In the loading warp: load a, b and, unless a_sf is None, factors of a's rows, as stages become free.

    `search` has the arguments of find_tile, which has found the first tile.
    """
    a, b, a_sf = operands
    a_tile, b_tile, a_sf_tile = tiles
    full, empty, slot = ring
    kind, tile, num_blocks, total, layout, m, n, num_groups, block_m, block_n, place = search
    while tile[0] < total:
        for step in T.serial(num_steps):
            T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
            if a_sf is not None:
                load_row_factors(a_sf, a_sf_tile, full, slot[0], place, step)
            load(a, b, a_tile, b_tile, full, slot[0], place, step)
            next_slot(slot, full.shape[0])
        tile[0] = tile[0] + num_blocks
        find_tile(kind, tile, num_blocks, total, layout, m, n, num_groups, block_m, block_n, place)


@T.macro
def find_factors(place: Any, first: Any, n: Any, num_steps: Any, at: Any, index: Any) -> None:
    """at[index] = start of the factors of the 128 columns that have the tile's column `first`, or of the last 128."""
    num_col_blocks = T.ceildiv(n, 128)
    group = T.max(place[B_GROUP], 0)  # There may be no tile.
    at[index] = (group * num_col_blocks + T.min((place[COL] + first) // 128, num_col_blocks - 1)) * num_steps


@T.macro
def find_both_factors(b_sf: Any, place: Any, n: Any, num_steps: Any, at: Any, factor: Any) -> None:
    """Set `at`, and `factor` to the first step's, for both blocks of 128 columns of a tile of 256."""
    for x in T.unroll(2):
        find_factors(place, x * 128, n, num_steps, at, x)
        factor[x] = b_sf[at[x]]


@T.macro
def multiply(a_tile: Any, b_tile: Any, slot: Any, first: Any, part: Any) -> None:
    """Begin part = a step's product with columns from `first` on."""
    T.wgmma_gemm(
        a_tile[slot, :, :],
        b_tile[slot, first : first + part.shape[1], :],
        part,
        transpose_B=True,
        # The two warpgroups split 128 rows, or the columns of 64 rows.
        policy=T.GemmWarpPolicy.FullRow if part.shape[0] == 128 else T.GemmWarpPolicy.FullCol,
        clear_accum=True,
    )


@T.macro
def issue(a_tile: Any, b_tile: Any, full: Any, slot: Any, last: Any, num_stages: Any, part: Any) -> None:
    """Begin part = a step's product once its operands are there; last[0] = their stage."""
    T.mbarrier_wait_parity(full[slot[0]], slot[1])
    multiply(a_tile, b_tile, slot[0], 0, part)
    last[0] = slot[0]
    next_slot(slot, num_stages)


@T.macro
def issue_and_await(
    a_tile: Any, b_tile: Any, full: Any, empty: Any, slot: Any, last: Any, num_stages: Any, part: Any
) -> None:
    """Begin a step's product, wait for the one before it, and release that one's stage."""
    before = T.alloc_var("int32")
    before = last[0]
    issue(a_tile, b_tile, full, slot, last, num_stages, part)
    T.wait_wgmma(1)
    release(empty, before)


@T.macro
def read_row_factors(a_sf: Any, tile: Any, by_tma: Any, slot: Any, place: Any, step: Any, m: Any, row_sf: Any) -> None:
    """row_sf = a step's factors of A's rows."""
    if by_tma:
        T.copy(tile[slot, :], row_sf)
    else:
        for i in T.Parallel(*row_sf.shape):
            row_sf[i] = a_sf[place[A_GROUP], step, T.min(place[ROW] + i, m - 1)]


@T.macro
def set_scale(row_sf: Any, factor: Any, scale: Any) -> None:
    """scale = row_sf · factor, for each row."""
    for i in T.Parallel(*scale.shape):
        scale[i] = row_sf[i] * factor


@T.macro
def add(part: Any, scale: Any, acc: Any) -> None:
    """acc = fma(scale, part, acc)."""
    for i, j in T.Parallel(*part.shape):
        acc[i, j] = T.ieee_fmaf(scale[i], part[i, j], acc[i, j])


@T.macro
def add_per_row(part: Any, row_sf: Any, col_sf: Any, acc: Any) -> None:
    """acc = fma(row_sf · col_sf, part, acc)."""
    for i, j in T.Parallel(*part.shape):
        acc[i, j] = T.ieee_fmaf(row_sf[i] * col_sf[j], part[i, j], acc[i, j])


@T.macro
def find_rows(kind: Any, layout: Any, m: Any, place: Any, is_row: Any) -> None:
    """is_row = which rows of the tile are a group's: `finish` zeroes the others, whatever their products are."""
    for i in T.Parallel(*is_row.shape):
        if kind == "ids":
            is_row[i] = T.cast(layout[T.min(place[ROW] + i, m - 1)] >= 0, "int32")
        else:
            is_row[i] = T.cast(i < place[NUM_ROWS], "int32")


@T.macro
def finish(acc: Any, c: Any, is_row: Any, m: Any, n: Any, place: Any, first: Any) -> None:
    """acc += c, and padding becomes zero; c and is_row may be None."""
    if c is not None:
        for i, j in T.Parallel(*acc.shape):
            if place[ROW] + i < m and place[COL] + first + j < n:
                acc[i, j] += T.cast(c[place[A_GROUP], place[ROW] + i, place[COL] + first + j], "float32")
    if is_row is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = T.if_then_else(is_row[i] != 0, acc[i, j], T.float32(0))


@T.macro
def store(kind: Any, acc: Any, n: Any, place: Any, first: Any, out: Any, d: Any) -> None:
    """Begin to write a tile's columns from `first` on, but no rows and columns past the last."""
    if kind == "masked":
        if place[NUM_ROWS] < acc.shape[0]:  # Rows past masked_m must not be written, and TMA only clips at M_max.
            for i, j in T.Parallel(*acc.shape):
                if i < place[NUM_ROWS] and place[COL] + first + j < n:
                    d[place[A_GROUP], place[ROW] + i, place[COL] + first + j] = acc[i, j]
        else:
            _store_by_tma(acc, place, first, out, d)
    else:
        _store_by_tma(acc, place, first, out, d)


@T.macro
def _store_by_tma(acc: Any, place: Any, first: Any, out: Any, d: Any) -> None:
    if acc.shape[0] == 128:
        _store_rows(acc, place, first, out, d)
    else:
        _store_whole(acc, place, first, out, d)


@T.macro
def _store_rows(acc: Any, place: Any, first: Any, out: Any, d: Any) -> None:
    """Each warpgroup stores its own 64 rows, in pieces through two buffers: neither waits for the other."""
    warpgroup = T.get_thread_binding() // 128
    size = out.shape[2]
    row = place[ROW] + warpgroup * 64
    for piece in T.unroll(acc.shape[1] // size):
        col = place[COL] + first + piece * size
        T.tma_store_wait(1)
        T.sync_threads(_STORE_BARRIER + warpgroup, 128)
        T.copy(acc[:, piece * size : piece * size + size], out[piece % 2, :, :])
        T.fence_proxy_async()
        T.sync_threads(_STORE_BARRIER + warpgroup, 128)
        rows = out[piece % 2, warpgroup * 64 : warpgroup * 64 + 64, :]
        T.tma_copy(rows, d[place[A_GROUP], row : row + 64, col : col + size], leader_scope_threads=128)


@T.macro
def _store_whole(acc: Any, place: Any, first: Any, out: Any, d: Any) -> None:
    """The warpgroups store a tile of 64 rows together: each has half of the columns."""
    col = place[COL] + first
    T.tma_store_wait(0)
    T.sync_threads(_STORE_BARRIER, 256)
    T.copy(acc, out)
    T.fence_proxy_async()
    T.sync_threads(_STORE_BARRIER, 256)
    T.tma_copy(out, d[place[A_GROUP], place[ROW] : place[ROW] + acc.shape[0], col : col + acc.shape[1]])
