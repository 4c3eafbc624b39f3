"""The kernel of FP8 products whose groups are ranges of K: both operands have factors for each row.

    load        one warp          128 channels of A, B and the factors of their rows a step, by TMA, into a ring
    multiply    two warpgroups    64 rows each: the tensor core's sum of 128 channels, then acc = fma(factors, sum, acc)

Thread block b takes tiles b, b + num_blocks, … of all groups' D, of 128 × 128.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import NUM_CONSUMERS, PASS_CONFIGS
from tk_gemm.lib.fp8_product_config import BLOCK_K, ProductConfig, out_shape

CONFIG = ProductConfig(128, 128, 5)


@kernel(pass_configs=PASS_CONFIGS)
def fp8_k_product_kernel(d_dtype: torch.dtype, with_c: bool, arch: Arch) -> Any:
    """D[g] = Σ A·Bᵀ over g's range of K (+ C[g]), of A (M, K) and B (N, K) with factors (steps, M) and (steps, N).

    `ends` (groups) says where each range ends, the next one beginning at the next multiple of 128.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import COL, ROW
    from tk_gemm.lib.k_grouped_steps import FIRST_STEP, K_PLACE_SIZE, NUM_STEPS, find_k_tile

    block_m, block_n, num_stages = CONFIG.block_m, CONFIG.block_n, CONFIG.num_stages
    m, n, k, num_steps, num_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_steps", "num_groups"))
    a_stride, a_sf_stride, b_stride, b_sf_stride = (steps.stride(f"{x}_stride") for x in ("a", "a_sf", "b", "b_sf"))
    strides = {x: steps.strides(x) for x in ("c", "d")}

    @T.prim_func
    def product(
        a: T.StridedTensor((m, k), (a_stride, 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_steps, m), (a_sf_stride, 1), "float32"),
        b: T.StridedTensor((n, k), (b_stride, 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor((num_steps, n), (b_sf_stride, 1), "float32"),
        ends: T.Tensor((num_groups,), "int32"),
        c: T.StridedTensor((num_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=NUM_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, block_m, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((num_stages, block_n, BLOCK_K), "float8_e4m3fn")
            a_sf_tile = T.alloc_shared((num_stages, block_m), "float32")
            b_sf_tile = T.alloc_shared((num_stages, block_n), "float32")
            out = T.alloc_shared(out_shape(CONFIG, d_dtype), d_dtype)
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([NUM_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((K_PLACE_SIZE,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            total = T.alloc_local((1,), "int32")
            T.clear(slot)
            T.clear(place)
            total[0] = num_groups * T.ceildiv(m, block_m) * T.ceildiv(n, block_n)
            num_turns = T.truncdiv(total[0] - block + num_blocks - 1, num_blocks)
            thread = T.get_thread_binding()
            if thread < NUM_CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((K_PLACE_SIZE,), "int32")
                part = T.alloc_fragment((block_m, block_n), "float32")
                acc = T.alloc_fragment((block_m, block_n), "float32")
                row_sf = T.alloc_fragment((block_m,), "float32")
                col_sf = T.alloc_fragment((block_n,), "float32")
                find_k_tile(block, total[0], ends, m, n, k, block_m, block_n, BLOCK_K, place)
                for turn in T.serial(num_turns):
                    for x in T.unroll(K_PLACE_SIZE):
                        here[x] = place[x]
                    T.clear(acc)
                    for _ in T.serial(here[NUM_STEPS]):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        steps.multiply(a_tile, b_tile, slot[0], 0, part)
                        T.copy(a_sf_tile[slot[0], :], row_sf)
                        T.copy(b_sf_tile[slot[0], :], col_sf)
                        T.wait_wgmma(0)
                        steps.release(empty, slot[0])
                        steps.next_slot(slot, num_stages)
                        steps.add_per_row(part, row_sf, col_sf, acc)
                    next_tile = block + (turn + 1) * num_blocks
                    find_k_tile(next_tile, total[0], ends, m, n, k, block_m, block_n, BLOCK_K, place)
                    steps.finish(acc, c if with_c else None, None, m, n, here, 0)
                    steps.store("k", acc, n, here, 0, out, d)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    for turn in T.serial(num_turns):
                        tile = block + turn * num_blocks
                        find_k_tile(tile, total[0], ends, m, n, k, block_m, block_n, BLOCK_K, place)
                        for index in T.serial(place[NUM_STEPS]):
                            T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                            step = place[FIRST_STEP] + index
                            rows = slice(place[ROW], place[ROW] + block_m)
                            cols = slice(place[COL], place[COL] + block_n)
                            channels = slice(step * BLOCK_K, (step + 1) * BLOCK_K)
                            for source, target in (
                                (a_sf[step, rows], a_sf_tile[slot[0], :]),
                                (b_sf[step, cols], b_sf_tile[slot[0], :]),
                                (a[rows, channels], a_tile[slot[0], :, :]),
                                (b[cols, channels], b_tile[slot[0], :, :]),
                            ):
                                T.tma_copy(source, target, barrier=full[slot[0]], leader_scope_threads=32)
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(full[slot[0]])
                            steps.next_slot(slot, num_stages)

    return product
