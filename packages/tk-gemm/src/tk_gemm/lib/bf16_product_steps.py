"""Steps of the BF16 products' kernels that they do not share with the FP8 products. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.bf16_product_config import STEP_K
from tk_gemm.lib.fp8_product_steps import A_GROUP, B_GROUP, COL, ROW, find_tile, num_tiles
from tk_gemm.lib.k_grouped_steps import FIRST_STEP, find_k_tile


@T.macro
def count(kind: Any, layout: Any, m: Any, n: Any, num_groups: Any, block_m: Any, block_n: Any, total: Any) -> None:
    """total[0] = number of tiles of D, of all groups."""
    num_tiles(kind, layout, m, n, num_groups, block_m, block_n, total)
    if kind == "k":
        total[0] = total[0] * layout.shape[0]


@T.macro
def find(
    kind: Any,
    tile: Any,
    num_blocks: Any,
    total: Any,
    layout: Any,
    m: Any,
    n: Any,
    k: Any,
    num_groups: Any,
    block_m: Any,
    block_n: Any,
    place: Any,
) -> None:
    """place = that of the thread block's next tile, from tile[0] on; tile[0] ≥ total if there is none."""
    if kind == "k":
        find_k_tile(tile[0], total, layout, m, n, k, block_m, block_n, STEP_K, place)
    else:
        find_tile(kind, tile, num_blocks, total, layout, m, n, num_groups, block_m, block_n, place)


@T.macro
def load(
    kind: Any, a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, slot: Any, place: Any, step: Any, transposed: Any
) -> None:
    """Begin to load a step's operands; transposed: whether A lies as (K, M), and B as (K, N)."""
    channel = (step + place[FIRST_STEP] if kind == "k" else step) * STEP_K
    group = 0 if kind == "k" else place[A_GROUP]
    if transposed[0]:
        rows = a[group, channel : channel + STEP_K, place[ROW] : place[ROW] + a_tile.shape[2]]
        T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    else:
        rows = a[group, place[ROW] : place[ROW] + a_tile.shape[1], channel : channel + STEP_K]
        T.tma_copy(rows, a_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if transposed[1]:
        cols = b[place[B_GROUP], channel : channel + STEP_K, place[COL] : place[COL] + b_tile.shape[2]]
        T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    else:
        cols = b[place[B_GROUP], place[COL] : place[COL] + b_tile.shape[1], channel : channel + STEP_K]
        T.tma_copy(cols, b_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if T.shuffle_elect(32):
        T.mbarrier_arrive(full[slot])


@T.macro
def multiply(a_tile: Any, b_tile: Any, slot: Any, transposed: Any, is_first: Any, acc: Any) -> None:
    """Begin acc += a step's product, or acc = it where the step is the first."""
    T.wgmma_gemm(
        a_tile[slot, :, :],
        b_tile[slot, :, :],
        acc,
        transpose_A=transposed[0],
        transpose_B=not transposed[1],
        # The two warpgroups split 128 rows, or the columns of 64 rows.
        policy=T.GemmWarpPolicy.FullRow if acc.shape[0] == 128 else T.GemmWarpPolicy.FullCol,
        clear_accum=is_first,
    )


@T.macro
def multiply_into_tensor_memory(
    a_tile: Any, b_tile: Any, slot: Any, transposed: Any, is_first: Any, sums: Any, done: Any
) -> None:
    """The same on Blackwell, into sums in tensor memory; done[slot] is signalled once the product is done."""
    T.tcgen05_gemm(
        a_tile[slot, :, :],
        b_tile[slot, :, :],
        sums,
        transpose_A=transposed[0],
        transpose_B=not transposed[1],
        mbar=done[slot],
        clear_accum=is_first,
    )
