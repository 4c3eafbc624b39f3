"""The FP8 products' kernel on Hopper: persistent thread blocks of one loading warp and two multiplying warpgroups.

    load        one warp          128 channels of A, B and A's factors a step, by TMA, into a ring in shared memory
    multiply    two warpgroups    the tensor core's sum of 128 channels, then acc = fma(factor, sum, acc)

Thread block b takes tiles b, b + num_blocks, … of D, of block_m × block_n. The warpgroups split the rows of a tile of
128, or the columns of one of 64 rows. A step's product is issued before the one before it is added up, and loads run
ahead into the next tile. fp8_product_wide.py is for tiles of 128 × 256, fp8_k_product.py for factors of each row of B;
docs/tuning/gemm.md has measurements.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product_config import BLOCK_K, Kind, ProductConfig, out_shape

NUM_CONSUMERS = 256
"""Threads of the multiplying warpgroups; a third warpgroup follows, of which one warp loads."""

PASS_CONFIGS = {
    # The ring's barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared here; TileLang's checks in the loop over channels cost up to 12 %.
    "tl.disable_safe_memory_legalize": True,
}


@kernel(pass_configs=PASS_CONFIGS)
def fp8_product_kernel(
    kind: Kind,
    config: ProductConfig,
    d_dtype: torch.dtype,
    a_sf_by_tma: bool,
    with_c: bool,
    arch: Arch,
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A's factors come by TMA where they are column major on 16 bytes, else by plain loads from any strides. B's are
    (groups, ⌈N/128⌉, steps), flattened.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import PLACE_SIZE

    block_m, block_n, num_stages = config.block_m, config.block_n, config.num_stages
    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    strides = {x: steps.strides(x) for x in ("a", "b", "c", "d", "sf")}
    sf_row_stride = 1 if a_sf_by_tma else steps.stride("sf_row_stride")

    @T.macro
    def scales(
        a_sf: Any,
        a_sf_tile: Any,
        b_sf: Any,
        here: Any,
        step: Any,
        last: Any,
        at: Any,
        factor: Any,
        row_sf: Any,
        scale: Any,
    ) -> None:
        # scale = a step's factors of the rows times that of the columns; the columns' next factor is loaded.
        steps.read_row_factors(a_sf, a_sf_tile, a_sf_by_tma, last[0], here, step, m, row_sf)
        steps.set_scale(row_sf, factor[0], scale)
        factor[0] = b_sf[at[0] + T.min(step + 1, num_steps - 1)]

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, m, k), (*strides["a"], 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_a_groups, num_steps, m), (*strides["sf"], sf_row_stride), "float32"),
        b: T.StridedTensor((num_b_groups, n, k), (*strides["b"], 1), "float8_e4m3fn"),
        b_sf: T.Tensor((num_factors,), "float32"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_a_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_a_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=NUM_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, block_m, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((num_stages, block_n, BLOCK_K), "float8_e4m3fn")
            a_sf_tile = T.alloc_shared((num_stages, block_m), "float32")
            out = T.alloc_shared(out_shape(config, d_dtype), d_dtype)
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
                last = T.alloc_local((1,), "int32")  # The stage of the last product that was issued.
                even = T.alloc_fragment((block_m, block_n), "float32")  # Products of even steps; below, of odd ones.
                odd = T.alloc_fragment((block_m, block_n), "float32")
                acc = T.alloc_fragment((block_m, block_n), "float32")
                row_sf = T.alloc_fragment((block_m,), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                is_row = T.alloc_fragment((block_m,), "int32") if is_padded else None
                first = thread // 128 * (block_n // 2) if block_m == 64 else 0
                steps.find_factors(place, first, n, num_steps, at, 0)
                factor[0] = b_sf[at[0]]
                while tile[0] < total[0]:
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    if is_padded:
                        steps.find_rows(kind, layout, m, here, is_row)
                    T.clear(acc)
                    steps.issue(a_tile, b_tile, full, slot, last, num_stages, even)
                    # Two steps at a time, and two ends: where ptxas can't tell which registers are being written, every
                    # product waits for the one before (tests/lib/test_machine_code.py).
                    for pair in T.serial(T.truncdiv(num_steps - 1, 2)):
                        scales(a_sf, a_sf_tile, b_sf, here, 2 * pair, last, at, factor, row_sf, scale)
                        steps.issue_and_await(a_tile, b_tile, full, empty, slot, last, num_stages, odd)
                        steps.add(even, scale, acc)
                        scales(a_sf, a_sf_tile, b_sf, here, 2 * pair + 1, last, at, factor, row_sf, scale)
                        steps.issue_and_await(a_tile, b_tile, full, empty, slot, last, num_stages, even)
                        steps.add(odd, scale, acc)
                    if num_steps % 2 == 0:
                        scales(a_sf, a_sf_tile, b_sf, here, num_steps - 2, last, at, factor, row_sf, scale)
                        steps.issue_and_await(a_tile, b_tile, full, empty, slot, last, num_stages, odd)
                        steps.add(even, scale, acc)
                        scales(a_sf, a_sf_tile, b_sf, here, num_steps - 1, last, at, factor, row_sf, scale)
                        T.wait_wgmma(0)
                        steps.add(odd, scale, acc)
                    else:
                        scales(a_sf, a_sf_tile, b_sf, here, num_steps - 1, last, at, factor, row_sf, scale)
                        T.wait_wgmma(0)
                        steps.add(even, scale, acc)
                    steps.release(empty, last[0])
                    tile[0] = tile[0] + num_blocks
                    steps.find_tile(
                        kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place
                    )
                    steps.find_factors(place, first, n, num_steps, at, 0)
                    factor[0] = b_sf[at[0]]
                    steps.finish(acc, c if with_c else None, is_row, m, n, here, 0)
                    steps.store(kind, acc, n, here, 0, out, d)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    operands, tiles = (a, b, a_sf if a_sf_by_tma else None), (a_tile, b_tile, a_sf_tile)
                    search = (kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place)
                    steps.load_tiles(operands, tiles, (full, empty, slot), search, num_steps)

    return product
