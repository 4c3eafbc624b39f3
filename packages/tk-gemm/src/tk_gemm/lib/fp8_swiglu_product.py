"""The kernel of an expert's first FP8 product with SwiGLU and the cast to e4m3: fp8_product_wide.py with another end.

    tile of 128 × 256    128 columns of the gate, and the same 128 of up
    epilogue             out = gate / (1 + exp(-gate)) * up * weight;  for each row: amax, factor, 128 codes

A row's 128 outputs are in four lanes of one warp, so their amax takes two shuffles and no shared memory.
"""

from typing import Any, Literal

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import NUM_CONSUMERS, PASS_CONFIGS
from tk_gemm.lib.fp8_product_config import BLOCK_K, WIDE


@kernel(pass_configs=PASS_CONFIGS)
def fp8_swiglu_product_kernel(
    kind: Literal["ids", "psum"], a_sf_by_tma: bool, with_weights: bool, with_clamp: bool, arch: Arch
) -> Any:
    """As fp8_product_wide_kernel, of interleaved B (groups, 2 · I, K), to data (1, M, I) and factors (I/128, M)."""
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib import swiglu_steps as own
    from tk_gemm.lib.fp8_product_steps import COL, PLACE_SIZE

    block_m, block_n, num_stages = WIDE.block_m, WIDE.block_n, WIDE.num_stages
    m, n, k, num_groups, num_cols = (T.dynamic(x) for x in ("m", "n", "k", "num_groups", "num_cols"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    num_blocks_of_cols, num_weights = T.dynamic("num_blocks_of_cols"), T.dynamic("num_weights")
    strides = {x: steps.strides(x) for x in ("a", "b", "data", "sf")}
    sf_row_stride = 1 if a_sf_by_tma else steps.stride("sf_row_stride")

    @T.prim_func
    def product(
        a: T.StridedTensor((1, m, k), (*strides["a"], 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((1, num_steps, m), (*strides["sf"], sf_row_stride), "float32"),
        b: T.StridedTensor((num_groups, n, k), (*strides["b"], 1), "float8_e4m3fn"),
        b_sf: T.Tensor((num_factors,), "float32"),
        layout: T.Tensor((layout_size,), "int32"),
        pos: T.Tensor((m,), "int32"),
        weights: T.Tensor((num_weights,), "float32"),
        data: T.StridedTensor((1, m, num_cols), (*strides["data"], 1), "float8_e4m3fn"),
        sf: T.StridedTensor((num_blocks_of_cols, m), (steps.stride("out_sf_stride"), 1), "float32"),
        clamp: T.float32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=NUM_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, block_m, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((num_stages, block_n, BLOCK_K), "float8_e4m3fn")
            a_sf_tile = T.alloc_shared((num_stages, block_m), "float32")
            out = T.alloc_shared((1, block_m, 128), "float8_e4m3fn")  # A tile's codes are one piece: no second buffer.
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([NUM_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            steps.num_tiles(kind, layout, m, n, 1, block_m, block_n, total)
            tile[0] = block
            steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_groups, block_m, block_n, place)
            thread = T.get_thread_binding()
            if thread < NUM_CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((PLACE_SIZE,), "int32")
                at = T.alloc_local((2,), "int32")  # Where the factors of B begin for each 128 of the tile's columns.
                factor = T.alloc_local((2,), "float32")
                part = T.alloc_fragment((block_m, 128), "float32")
                gate = T.alloc_fragment((block_m, 128), "float32")
                up = T.alloc_fragment((block_m, 128), "float32")
                row_sf = T.alloc_fragment((block_m,), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                is_row = T.alloc_fragment((block_m,), "int32")
                weight = T.alloc_fragment((block_m,), "float32")
                amax = T.alloc_fragment((block_m,), "int32")
                steps.find_both_factors(b_sf, place, n, num_steps, at, factor)
                while tile[0] < total[0]:
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    steps.find_rows(kind, layout, m, here, is_row)
                    if with_weights:
                        own.find_weights(pos, weights, m, num_weights, here, is_row, weight)
                    T.clear(gate)
                    T.clear(up)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        steps.multiply(a_tile, b_tile, slot[0], 0, part)
                        steps.read_row_factors(a_sf, a_sf_tile, a_sf_by_tma, slot[0], here, step, m, row_sf)
                        steps.set_scale(row_sf, factor[0], scale)
                        T.wait_wgmma(0)
                        steps.add(part, scale, gate)
                        steps.multiply(a_tile, b_tile, slot[0], 128, part)
                        steps.set_scale(row_sf, factor[1], scale)
                        for x in T.unroll(2):
                            factor[x] = b_sf[at[x] + T.min(step + 1, num_steps - 1)]
                        T.wait_wgmma(0)
                        steps.release(empty, slot[0])
                        steps.next_slot(slot, num_stages)
                        steps.add(part, scale, up)
                    tile[0] = tile[0] + num_blocks
                    steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_groups, block_m, block_n, place)
                    steps.find_both_factors(b_sf, place, n, num_steps, at, factor)
                    here[COL] = here[COL] // 2
                    own.activate(gate, up, weight if with_weights else None, clamp if with_clamp else None)
                    own.quantize(gate, part, is_row, amax, scale, sf, m, here)
                    T.tma_store_wait(0)
                    steps.store(kind, gate, num_cols, here, 0, out, data)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    operands, tiles = (a, b, a_sf if a_sf_by_tma else None), (a_tile, b_tile, a_sf_tile)
                    search = (kind, tile, num_blocks, total[0], layout, m, n, num_groups, block_m, block_n, place)
                    steps.load_tiles(operands, tiles, (full, empty, slot), search, num_steps)

    return product
