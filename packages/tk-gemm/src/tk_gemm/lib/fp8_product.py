"""The FP8 products' kernel on Hopper: persistent thread blocks of one loading warp and two multiplying warpgroups.

    load        one warp          128 channels of A, B and A's factors a step, by TMA, into a ring in shared memory
    multiply    two warpgroups    64 rows each: the tensor core's sum of 128 channels, then acc = fma(factor, sum, acc)

A thread block takes one tile of 128 × block_n of D after the other, every `num_blocks`-th of all. While one warpgroup
adds up, the other's product runs. The ring goes on from tile to tile: a tile's first operands are there before the
tile before it is stored. docs/tuning/gemm.md has what was measured.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product_config import BLOCK_K, BLOCK_M, Kind, ProductConfig

_CONSUMERS = 256
"""Threads of the multiplying warpgroups; a third warpgroup follows, of which one warp loads."""
_STORE_BARRIER = 4
"""Number of the hardware barrier of the multiplying warps; TileLang takes 1 to 3 itself."""

_PASS_CONFIGS = {
    # The ring's barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared here; TileLang's checks in the loop over channels cost 12 % (docs/tuning).
    "tl.disable_safe_memory_legalize": True,
}


@kernel(pass_configs=_PASS_CONFIGS)
def fp8_product_kernel(
    kind: Kind,
    config: ProductConfig,
    d_dtype: torch.dtype,
    a_sf_by_tma: bool,
    b_is_per_row: bool,
    with_c: bool,
    arch: Arch,
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known at run time alone.

    A's factors come by TMA where they are column major on 16 bytes, else by plain loads from any strides. B's are a
    flat (groups, ⌈N/128⌉, steps), or with `b_is_per_row` (steps, N) by TMA. A tile of 256 columns is two products.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import A_GROUP, B_GROUP, PLACE_SIZE, ROW

    block_n, num_stages = config.block_n, config.num_stages
    is_wide, part_n = block_n == 256, min(block_n, 128)
    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    strides = {x: (T.dynamic(f"{x}_group_stride"), T.dynamic(f"{x}_stride")) for x in ("a", "b", "c", "d", "sf")}
    sf_row_stride = 1 if a_sf_by_tma else T.dynamic("sf_row_stride")
    b_sf_shape = (num_steps, n) if b_is_per_row else (num_factors,)
    b_sf_strides = (T.dynamic("b_sf_stride"), 1) if b_is_per_row else (1,)

    @T.macro
    def write(acc: Any, c: Any, is_row: Any, here: Any, first: Any, out: Any, d: Any) -> None:
        T.tma_store_wait(0)
        T.sync_threads(_STORE_BARRIER, _CONSUMERS)
        steps.round_off(acc, c if with_c else None, is_row, m, n, here, first, out)
        T.fence_proxy_async()
        T.sync_threads(_STORE_BARRIER, _CONSUMERS)
        steps.store(kind, out, d, n, here, first)

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, m, k), (*strides["a"], 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_a_groups, num_steps, m), (*strides["sf"], sf_row_stride), "float32"),
        b: T.StridedTensor((num_b_groups, n, k), (*strides["b"], 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor(b_sf_shape, b_sf_strides, "float32"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_a_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_a_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, BLOCK_M, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((num_stages, block_n, BLOCK_K), "float8_e4m3fn")
            a_sf_tile = T.alloc_shared((num_stages, BLOCK_M), "float32")
            b_sf_tile = T.alloc_shared((num_stages, block_n if b_is_per_row else 1), "float32")
            out = T.alloc_shared((BLOCK_M, part_n), d_dtype)
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            steps.num_tiles(kind, layout, m, n, num_a_groups, block_n, total)
            num_turns = T.truncdiv(total[0] - block + num_blocks - 1, num_blocks)
            thread = T.get_thread_binding()
            if thread < _CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((PLACE_SIZE,), "int32")
                at = T.alloc_local((2,), "int32")  # Of B's factors for the tile's one or two blocks of 128 columns.
                factor = T.alloc_local((2,), "float32")
                part = T.alloc_fragment((BLOCK_M, part_n), "float32")
                acc = T.alloc_fragment((BLOCK_M, part_n), "float32")
                if is_wide:
                    acc_high = T.alloc_fragment((BLOCK_M, part_n), "float32")
                row_sf = T.alloc_fragment((BLOCK_M,), "float32")
                scale = T.alloc_fragment((BLOCK_M,), "float32")
                if b_is_per_row:
                    col_sf = T.alloc_fragment((part_n,), "float32")
                is_row = T.alloc_fragment((BLOCK_M,), "int32") if is_padded else None
                steps.find_tile(kind, block, total[0], layout, m, n, num_b_groups, block_n, place)
                for turn in T.serial(num_turns):
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    if here[B_GROUP] >= 0:
                        if not b_is_per_row:
                            steps.find_factors(here, n, num_steps, at)
                            steps.load_factors(b_sf, at, 0, factor)
                        if is_padded:
                            steps.find_rows(kind, layout, m, here, is_row)
                        T.clear(acc)
                        if is_wide:
                            T.clear(acc_high)
                        for step in T.serial(num_steps):
                            T.mbarrier_wait_parity(full[slot[0]], slot[1])
                            steps.multiply(a_tile, b_tile, slot[0], 0, part)
                            if a_sf_by_tma:
                                T.copy(a_sf_tile[slot[0], :], row_sf)
                            else:
                                for i in T.Parallel(BLOCK_M):
                                    row_sf[i] = a_sf[here[A_GROUP], step, T.min(here[ROW] + i, m - 1)]
                            if b_is_per_row:
                                T.copy(b_sf_tile[slot[0], :], col_sf)
                            else:
                                steps.set_scale(row_sf, factor[0], scale)
                            T.wait_wgmma(0)
                            if is_wide:
                                steps.add(part, scale, acc)
                                steps.multiply(a_tile, b_tile, slot[0], 128, part)
                                steps.set_scale(row_sf, factor[1], scale)
                                steps.load_factors(b_sf, at, T.min(step + 1, num_steps - 1), factor)
                                T.wait_wgmma(0)
                            elif not b_is_per_row:
                                steps.load_factors(b_sf, at, T.min(step + 1, num_steps - 1), factor)
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(empty[slot[0]])
                            steps.next_slot(slot, num_stages)
                            if b_is_per_row:
                                steps.add_per_row(part, row_sf, col_sf, acc)
                            else:
                                steps.add(part, scale, acc_high if is_wide else acc)
                    next_tile = block + (turn + 1) * num_blocks
                    steps.find_tile(kind, next_tile, total[0], layout, m, n, num_b_groups, block_n, place)
                    if here[B_GROUP] >= 0:
                        write(acc, c, is_row, here, 0, out, d)
                        if is_wide:
                            write(acc_high, c, is_row, here, 128, out, d)
            else:
                T.set_max_nreg(40, 0)
                if thread < _CONSUMERS + 32:
                    for turn in T.serial(num_turns):
                        tile = block + turn * num_blocks
                        steps.find_tile(kind, tile, total[0], layout, m, n, num_b_groups, block_n, place)
                        if place[B_GROUP] >= 0:
                            for step in T.serial(num_steps):
                                T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                                if a_sf_by_tma:
                                    steps.load_row_factors(a_sf, a_sf_tile, full, slot[0], place, step)
                                if b_is_per_row:
                                    steps.load_col_factors(b_sf, b_sf_tile, full, slot[0], place, step)
                                steps.load(a, b, a_tile, b_tile, full, slot[0], place, step)
                                steps.next_slot(slot, num_stages)

    return product
