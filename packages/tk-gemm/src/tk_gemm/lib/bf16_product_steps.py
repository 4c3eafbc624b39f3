"""Steps of the BF16 products' kernel, beside those that it shares with the FP8 products. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.bf16_product_config import STEP_K
from tk_gemm.lib.fp8_product_config import BLOCK_M
from tk_gemm.lib.fp8_product_steps import A_GROUP, B_GROUP, COL, NUM_ROWS, ROW


@T.macro
def load(
    a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, slot: Any, place: Any, step: Any, is_transposed: Any
) -> None:
    """Begin to load a step's operands; is_transposed: whether A lies as (K, M), and B as (K, N)."""
    channel = step * STEP_K
    if is_transposed[0]:
        rows = a[place[A_GROUP], channel : channel + STEP_K, place[ROW] : place[ROW] + BLOCK_M]
        T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    else:
        rows = a[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, channel : channel + STEP_K]
        T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if is_transposed[1]:
        cols = b[place[B_GROUP], channel : channel + STEP_K, place[COL] : place[COL] + b_tile.shape[2]]
        T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    else:
        cols = b[place[B_GROUP], place[COL] : place[COL] + b_tile.shape[1], channel : channel + STEP_K]
        T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if T.shuffle_elect(32):
        T.mbarrier_arrive(full[slot])


@T.macro
def multiply(a_tile: Any, b_tile: Any, slot: Any, is_transposed: Any, is_first: Any, acc: Any) -> None:
    """Begin acc += a step's rows · columns; the first step's begins at zero."""
    T.wgmma_gemm(
        a_tile[slot, :, :],
        b_tile[slot, :, :],
        acc,
        transpose_A=is_transposed[0],
        transpose_B=not is_transposed[1],
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=is_first,
    )


@T.macro
def finish(acc: Any, c: Any, is_row: Any, m: Any, n: Any, place: Any) -> None:
    """acc += c, and zero in rows that are no group's; c and is_row may be None."""
    if c is not None:
        for i, j in T.Parallel(*acc.shape):
            if place[ROW] + i < m and place[COL] + j < n:
                acc[i, j] += T.cast(c[place[A_GROUP], place[ROW] + i, place[COL] + j], "float32")
    if is_row is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = T.if_then_else(is_row[i] != 0, acc[i, j], T.float32(0))


@T.macro
def store_part(kind: Any, out: Any, part: Any, d: Any, n: Any, place: Any) -> None:
    """Begin to write a part of a tile's columns; rows and columns past the last are left out."""
    part_n = out.shape[2]
    col = place[COL] + part * part_n
    if kind == "masked":
        if place[NUM_ROWS] < BLOCK_M:  # Rows past masked_m are not to be written, and TMA knows of M_max alone.
            for i, j in T.Parallel(BLOCK_M, part_n):
                if i < place[NUM_ROWS] and col + j < n:
                    d[place[A_GROUP], place[ROW] + i, col + j] = out[part % 2, i, j]
        else:
            T.tma_copy(out[part % 2, :, :], d[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, col : col + part_n])
    else:
        T.tma_copy(out[part % 2, :, :], d[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, col : col + part_n])
