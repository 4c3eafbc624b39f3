"""The FP8 products' kernel for tiles of 128 × 256: fp8_product.py with two products a step, one after the other.

A warpgroup keeps sums of 64 × 256, and there are registers left for the product of 128 of these columns. A is loaded
half as often as for 128 × 128, so this is the fastest where there are enough tiles.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import NUM_CONSUMERS, PASS_CONFIGS
from tk_gemm.lib.fp8_product_config import BLOCK_K, WIDE, Kind, out_shape


@kernel(pass_configs=PASS_CONFIGS)
def fp8_product_wide_kernel(kind: Kind, d_dtype: torch.dtype, a_sf_by_tma: bool, with_c: bool, arch: Arch) -> Any:
    """As fp8_product_kernel, for the tile WIDE."""
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import PLACE_SIZE

    block_m, block_n, num_stages = WIDE.block_m, WIDE.block_n, WIDE.num_stages
    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    strides = {x: steps.strides(x) for x in ("a", "b", "c", "d", "sf")}
    sf_row_stride = 1 if a_sf_by_tma else steps.stride("sf_row_stride")

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
            out = T.alloc_shared(out_shape(WIDE, d_dtype), d_dtype)
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
                at = T.alloc_local((2,), "int32")  # Where the factors of B begin for each 128 of the tile's columns.
                factor = T.alloc_local((2,), "float32")
                part = T.alloc_fragment((block_m, 128), "float32")
                low = T.alloc_fragment((block_m, 128), "float32")
                high = T.alloc_fragment((block_m, 128), "float32")
                row_sf = T.alloc_fragment((block_m,), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                is_row = T.alloc_fragment((block_m,), "int32") if is_padded else None
                steps.find_both_factors(b_sf, place, n, num_steps, at, factor)
                while tile[0] < total[0]:
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    if is_padded:
                        steps.find_rows(kind, layout, m, here, is_row)
                    T.clear(low)
                    T.clear(high)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        steps.multiply(a_tile, b_tile, slot[0], 0, part)
                        steps.read_row_factors(a_sf, a_sf_tile, a_sf_by_tma, slot[0], here, step, m, row_sf)
                        steps.set_scale(row_sf, factor[0], scale)
                        T.wait_wgmma(0)
                        steps.add(part, scale, low)
                        steps.multiply(a_tile, b_tile, slot[0], 128, part)
                        steps.set_scale(row_sf, factor[1], scale)
                        if step < num_steps - 1:
                            for x in T.unroll(2):
                                factor[x] = b_sf[at[x] + step + 1]
                        else:
                            tile[0] = tile[0] + num_blocks
                            steps.find_tile(
                                kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place
                            )
                            steps.find_both_factors(b_sf, place, n, num_steps, at, factor)
                            steps.finish(low, c if with_c else None, is_row, m, n, here, 0)
                            steps.store(kind, low, n, here, 0, out, d)
                        T.wait_wgmma(0)
                        steps.release(empty, slot[0])
                        steps.next_slot(slot, num_stages)
                        steps.add(part, scale, high)
                    steps.finish(high, c if with_c else None, is_row, m, n, here, 128)
                    steps.store(kind, high, n, here, 128, out, d)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    operands, tiles = (a, b, a_sf if a_sf_by_tma else None), (a_tile, b_tile, a_sf_tile)
                    search = (kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, block_m, block_n, place)
                    steps.load_tiles(operands, tiles, (full, empty, slot), search, num_steps)

    return product
