"""Steps of the FP8 products' kernel: which tile is next, and what is done with one. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_config import BLOCK_K, BLOCK_M, STRIP

ROW, COL, A_GROUP, B_GROUP, NUM_ROWS, CURSOR, TILES_BEFORE = range(7)
"""What a tile's place holds: first row and column, groups of A and D and of B (-1: leave it out), rows that count, and
for masked rows the group that the search has come to with the tiles of the groups before."""
PLACE_SIZE = 7


@T.macro
def num_tiles(kind: Any, layout: Any, m: Any, n: Any, num_groups: Any, block_n: Any, total: Any) -> None:
    """total[0] = tiles of D."""
    total[0] = T.ceildiv(m, BLOCK_M)
    if kind == "masked":
        total[0] = 0
        for group in T.serial(num_groups):
            total[0] += T.ceildiv(T.max(T.min(layout[group], m), 0), BLOCK_M)
    total[0] = total[0] * T.ceildiv(n, block_n)


@T.macro
def _find_masked(tile: Any, layout: Any, m: Any, num_n: Any, block_n: Any, place: Any) -> None:
    # Tiles come in ascending order, so the search goes on where it was.
    count = T.alloc_var("int32")
    num_m = T.alloc_var("int32")
    count = T.max(T.min(layout[place[CURSOR]], m), 0)
    num_m = T.ceildiv(count, BLOCK_M)
    while tile >= place[TILES_BEFORE] + num_m * num_n:
        place[TILES_BEFORE] += num_m * num_n
        place[CURSOR] += 1
        count = T.max(T.min(layout[place[CURSOR]], m), 0)
        num_m = T.ceildiv(count, BLOCK_M)
    place[ROW] = T.truncmod(tile - place[TILES_BEFORE], num_m) * BLOCK_M
    place[COL] = T.truncdiv(tile - place[TILES_BEFORE], num_m) * block_n
    place[A_GROUP] = place[CURSOR]
    place[B_GROUP] = place[CURSOR]
    place[NUM_ROWS] = count - place[ROW]


@T.macro
def _find_psum(layout: Any, num_groups: Any, place: Any) -> None:
    # The first group that ends after the tile's first row: groups without rows end where they begin.
    low = T.alloc_var("int32", init=0)
    high = T.alloc_var("int32")
    low = 0
    high = num_groups
    while low < high:
        middle = (low + high) >> 1
        if layout[middle] > place[ROW]:
            high = middle
        else:
            low = middle + 1
    place[B_GROUP] = -1
    if low < num_groups:
        place[B_GROUP] = low
        place[NUM_ROWS] = layout[low] - place[ROW]


@T.macro
def find_tile(
    kind: Any, tile: Any, total: Any, layout: Any, m: Any, n: Any, num_groups: Any, block_n: Any, place: Any
) -> None:
    """The place of a tile, if there is such a tile: strips of STRIP row tiles, so that their rows stay in L2."""
    if tile < total:
        num_n = T.ceildiv(n, block_n)
        if kind == "masked":
            _find_masked(tile, layout, m, num_n, block_n, place)
        else:
            strip = T.truncdiv(tile, STRIP * num_n)
            inner = T.truncmod(tile, STRIP * num_n)
            num_m = T.min(STRIP, T.ceildiv(m, BLOCK_M) - strip * STRIP)
            place[ROW] = (strip * STRIP + T.truncmod(inner, num_m)) * BLOCK_M
            place[COL] = T.truncdiv(inner, num_m) * block_n
            place[A_GROUP] = 0
            place[B_GROUP] = 0
            if kind == "ids":
                place[B_GROUP] = layout[place[ROW]]
            elif kind == "psum":
                _find_psum(layout, num_groups, place)


@T.macro
def next_slot(slot: Any, num_stages: Any) -> None:
    """slot = [place in the ring, parity of the round]."""
    slot[0] += 1
    if slot[0] == num_stages:
        slot[0] = 0
        slot[1] = slot[1] ^ 1


@T.macro
def load_row_factors(a_sf: Any, tile: Any, full: Any, slot: Any, place: Any, step: Any) -> None:
    """Begin to load a step's factors of A's rows."""
    rows = a_sf[place[A_GROUP], step, place[ROW] : place[ROW] + BLOCK_M]
    T.tma_copy(rows, tile[slot, :], barrier=full[slot], leader_scope_threads=32)


@T.macro
def load_col_factors(b_sf: Any, tile: Any, full: Any, slot: Any, place: Any, step: Any) -> None:
    """Begin to load a step's factors of B's rows, D's columns."""
    cols = b_sf[step, place[COL] : place[COL] + tile.shape[1]]
    T.tma_copy(cols, tile[slot, :], barrier=full[slot], leader_scope_threads=32)


@T.macro
def load(a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, slot: Any, place: Any, step: Any) -> None:
    """Begin to load a step's operands, the last of its loads."""
    channel = step * BLOCK_K
    rows = a[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, channel : channel + BLOCK_K]
    T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    cols = b[place[B_GROUP], place[COL] : place[COL] + b_tile.shape[1], channel : channel + BLOCK_K]
    T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if T.shuffle_elect(32):
        T.mbarrier_arrive(full[slot])


@T.macro
def find_factors(place: Any, n: Any, num_steps: Any, at: Any) -> None:
    """Where the factors of the tile's first and second block of 128 columns begin; the last block's, if it has one."""
    num_col_blocks = T.ceildiv(n, 128)
    at[0] = (place[B_GROUP] * num_col_blocks + place[COL] // 128) * num_steps
    at[1] = at[0]
    if place[COL] // 128 + 1 < num_col_blocks:
        at[1] = at[0] + num_steps


@T.macro
def load_factors(b_sf: Any, at: Any, step: Any, factor: Any) -> None:
    """A step's factors of B's blocks, loaded a step ahead."""
    factor[0] = b_sf[at[0] + step]
    factor[1] = b_sf[at[1] + step]


@T.macro
def multiply(a_tile: Any, b_tile: Any, slot: Any, first: Any, part: Any) -> None:
    """Begin part = a step's rows · columns `first` and on."""
    T.wgmma_gemm(
        a_tile[slot, :, :],
        b_tile[slot, first : first + part.shape[1], :],
        part,
        transpose_B=True,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=True,
    )


@T.macro
def set_scale(row_sf: Any, factor: Any, scale: Any) -> None:
    """scale = row_sf · factor, once a row."""
    for i in T.Parallel(BLOCK_M):
        scale[i] = row_sf[i] * factor


@T.macro
def add(part: Any, scale: Any, acc: Any) -> None:
    """acc = fma(scale, part, acc)."""
    for i, j in T.Parallel(*part.shape):
        acc[i, j] = T.ieee_fmaf(scale[i], part[i, j], acc[i, j])


@T.macro
def add_per_row(part: Any, row_sf: Any, col_sf: Any, acc: Any) -> None:
    """The same with a factor for each column."""
    for i, j in T.Parallel(*part.shape):
        acc[i, j] = T.ieee_fmaf(row_sf[i] * col_sf[j], part[i, j], acc[i, j])


@T.macro
def find_rows(kind: Any, layout: Any, m: Any, place: Any, is_row: Any) -> None:
    """Which rows of the tile are a group's: the others come out zero, whatever was multiplied for them."""
    for i in T.Parallel(BLOCK_M):
        if kind == "ids":
            is_row[i] = T.cast(layout[T.min(place[ROW] + i, m - 1)] >= 0, "int32")
        else:
            is_row[i] = T.cast(i < place[NUM_ROWS], "int32")


@T.macro
def round_off(acc: Any, c: Any, is_row: Any, m: Any, n: Any, place: Any, first: Any, out: Any) -> None:
    """out = acc + c in D's dtype; c and is_row may be None."""
    if c is not None:
        for i, j in T.Parallel(*acc.shape):
            if place[ROW] + i < m and place[COL] + first + j < n:
                acc[i, j] += T.cast(c[place[A_GROUP], place[ROW] + i, place[COL] + first + j], "float32")
    if is_row is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = T.if_then_else(is_row[i] != 0, acc[i, j], T.float32(0))
    T.copy(acc, out)


@T.macro
def store(kind: Any, out: Any, d: Any, n: Any, place: Any, first: Any) -> None:
    """Begin to write a tile's columns `first` and on; rows and columns past the last are left out."""
    if kind == "masked":
        if place[NUM_ROWS] < BLOCK_M:  # Rows past masked_m are not to be written, and TMA knows of M_max alone.
            for i, j in T.Parallel(*out.shape):
                if i < place[NUM_ROWS] and place[COL] + first + j < n:
                    d[place[A_GROUP], place[ROW] + i, place[COL] + first + j] = out[i, j]
        else:
            _store_whole(out, d, place, first)
    else:
        _store_whole(out, d, place, first)


@T.macro
def _store_whole(out: Any, d: Any, place: Any, first: Any) -> None:
    col = place[COL] + first
    T.tma_copy(out, d[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, col : col + out.shape[1]])
