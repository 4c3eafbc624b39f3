"""The FP8 products' kernel on Hopper: persistent thread blocks of one loading warp and two multiplying warpgroups.

    load        one warp          128 channels of A, B and A's factors a step, by TMA, into a ring in shared memory
    multiply    two warpgroups    the tensor core's sum of 128 channels, then acc = fma(factor, sum, acc)

A thread block takes one tile of block_m × block_n of D after the other, every `num_blocks`-th of all. The warpgroups
share its 128 rows, or the columns of 64 rows. The next product is issued before the last tile is stored: the ring goes
on from tile to tile. fp8_product_wide.py is for tiles of 256 columns; docs/tuning/gemm.md has what was measured.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product_config import BLOCK_K, Kind, ProductConfig

NUM_CONSUMERS = 256
"""Threads of the multiplying warpgroups; a third warpgroup follows, of which one warp loads."""

PASS_CONFIGS = {
    # The ring's barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared here; TileLang's checks in the loop over channels cost 12 % (docs/tuning).
    "tl.disable_safe_memory_legalize": True,
}


@kernel(pass_configs=PASS_CONFIGS)
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
    flat (groups, ⌈N/128⌉, steps), or with `b_is_per_row` (steps, N) by TMA.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import PLACE_SIZE

    block_m, block_n, num_stages = config.block_m, config.block_n, config.num_stages
    out_shape = (2, 128, 128 // d_dtype.itemsize) if block_m == 128 else (64, block_n)
    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    strides = {x: (T.dynamic(f"{x}_group_stride"), T.dynamic(f"{x}_stride")) for x in ("a", "b", "c", "d", "sf")}
    sf_row_stride = 1 if a_sf_by_tma else T.dynamic("sf_row_stride")
    b_sf_shape = (num_steps, n) if b_is_per_row else (num_factors,)
    b_sf_strides = (T.dynamic("b_sf_stride"), 1) if b_is_per_row else (1,)

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
        with T.Kernel(num_blocks, threads=NUM_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, block_m, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((num_stages, block_n, BLOCK_K), "float8_e4m3fn")
            a_sf_tile = T.alloc_shared((num_stages, block_m), "float32")
            b_sf_tile = T.alloc_shared((num_stages, block_n if b_is_per_row else 1), "float32")
            out = T.alloc_shared(out_shape, d_dtype)
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([NUM_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            steps.num_tiles(kind, layout, m, n, num_a_groups, block_m, block_n, total)
            tile[0] = block
            steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place)
            thread = T.get_thread_binding()
            if thread < NUM_CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((PLACE_SIZE,), "int32")
                at = T.alloc_local((1,), "int32")  # Where the factors of B begin for the tile's columns.
                factor = T.alloc_local((1,), "float32")
                part = T.alloc_fragment((block_m, block_n), "float32")
                acc = T.alloc_fragment((block_m, block_n), "float32")
                row_sf = T.alloc_fragment((block_m,), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                if b_is_per_row:
                    col_sf = T.alloc_fragment((block_n,), "float32")
                is_row = T.alloc_fragment((block_m,), "int32") if is_padded else None
                first = thread // 128 * (block_n // 2) if block_m == 64 else 0
                if tile[0] < total[0]:
                    if not b_is_per_row:
                        steps.find_factors(place, first, n, num_steps, at, 0)
                        factor[0] = b_sf[at[0]]
                    T.mbarrier_wait_parity(full[slot[0]], slot[1])
                    steps.multiply(a_tile, b_tile, slot[0], 0, part)
                while tile[0] < total[0]:
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    if is_padded:
                        steps.find_rows(kind, layout, m, here, is_row)
                    T.clear(acc)
                    for step in T.serial(num_steps):
                        steps.read_row_factors(a_sf, a_sf_tile, a_sf_by_tma, slot[0], here, step, m, row_sf)
                        if b_is_per_row:
                            T.copy(b_sf_tile[slot[0], :], col_sf)
                        else:
                            steps.set_scale(row_sf, factor[0], scale)
                        T.wait_wgmma(0)
                        steps.release(empty, slot, num_stages)
                        if step == num_steps - 1:
                            tile[0] = tile[0] + num_blocks
                            steps.find_tile(
                                kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place
                            )
                            if not b_is_per_row:
                                steps.find_factors(place, first, n, num_steps, at, 0)
                                factor[0] = b_sf[at[0]]
                        else:
                            if not b_is_per_row:
                                factor[0] = b_sf[at[0] + step + 1]
                        if b_is_per_row:
                            steps.add_per_row(part, row_sf, col_sf, acc)
                        else:
                            steps.add(part, scale, acc)
                        if step < num_steps - 1 or tile[0] < total[0]:
                            T.mbarrier_wait_parity(full[slot[0]], slot[1])
                            steps.multiply(a_tile, b_tile, slot[0], 0, part)
                    steps.finish(acc, c if with_c else None, is_row, m, n, here, 0)
                    steps.store(kind, acc, n, here, 0, out, d)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    while tile[0] < total[0]:
                        for step in T.serial(num_steps):
                            T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                            if a_sf_by_tma:
                                steps.load_row_factors(a_sf, a_sf_tile, full, slot[0], place, step)
                            if b_is_per_row:
                                steps.load_col_factors(b_sf, b_sf_tile, full, slot[0], place, step)
                            steps.load(a, b, a_tile, b_tile, full, slot[0], place, step)
                            steps.next_slot(slot, num_stages)
                        tile[0] = tile[0] + num_blocks
                        steps.find_tile(
                            kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place
                        )

    return product
