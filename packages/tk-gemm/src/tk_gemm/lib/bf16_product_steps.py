"""Steps of the BF16 products' kernel, beside those that it shares with the FP8 products. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.bf16_product_config import STEP_K
from tk_gemm.lib.fp8_product_config import BLOCK_M
from tk_gemm.lib.fp8_product_steps import B_GROUP, COL, ROW, find_tile
from tk_gemm.lib.k_grouped_steps import find_k_tile


@T.macro
def find(
    kind: Any,
    tile: Any,
    total: Any,
    layout: Any,
    m: Any,
    n: Any,
    k: Any,
    num_groups: Any,
    block_n: Any,
    place: Any,
) -> None:
    """The place of a tile, if there is such a tile."""
    if kind == "k":
        find_k_tile(tile, total, layout, m, n, k, block_n, STEP_K, place)
    else:
        find_tile(kind, tile, total, layout, m, n, num_groups, block_n, place)


@T.macro
def load(
    a: Any,
    b: Any,
    a_tile: Any,
    b_tile: Any,
    full: Any,
    slot: Any,
    place: Any,
    group: Any,
    channel: Any,
    is_transposed: Any,
) -> None:
    """Begin to load a step's operands; is_transposed: whether A lies as (K, M), and B as (K, N)."""
    if is_transposed[0]:
        rows = a[group, channel : channel + STEP_K, place[ROW] : place[ROW] + BLOCK_M]
        T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    else:
        rows = a[group, place[ROW] : place[ROW] + BLOCK_M, channel : channel + STEP_K]
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
