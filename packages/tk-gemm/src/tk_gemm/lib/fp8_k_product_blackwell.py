"""The kernel on Blackwell of FP8 products whose groups are ranges of K: factors of both operands' rows, packed UE8M0.

As fp8_product_blackwell.py: one warp loads, one arranges words of factors, one multiplies, four store. A word has the
factors of four steps, counted from the beginning of K: a group may begin at any of its bytes.

The kernel is compiled for sm_100a and sm_103a, and has not run: there was no such GPU.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import PASS_CONFIGS
from tk_gemm.lib.fp8_product_blackwell import BLOCK, NUM_STAGES, PIECE
from tk_gemm.lib.fp8_product_config import BLOCK_K


@kernel(pass_configs=PASS_CONFIGS)
def fp8_k_product_blackwell_kernel(d_dtype: torch.dtype, with_c: bool, arch: Arch) -> Any:
    """D[g] = Σ A·Bᵀ over g's range of K (+ C[g]), of A (M, K) and B (N, K) with words (words, M) and (words, N).

    `ends` (groups) says where each range ends, the next one beginning at the next multiple of 128.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_blackwell_steps as own
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import COL, ROW
    from tk_gemm.lib.k_grouped_steps import FIRST_STEP, K_PLACE_SIZE, NUM_STEPS, find_k_tile

    m, n, k, num_words, num_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_words", "num_groups"))
    a_stride, a_sf_stride, b_stride, b_sf_stride = (steps.stride(f"{x}_stride") for x in ("a", "a_sf", "b", "b_sf"))
    strides = {x: steps.strides(x) for x in ("c", "d")}

    @T.prim_func
    def product(
        a: T.StridedTensor((m, k), (a_stride, 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_words, m), (a_sf_stride, 1), "int32"),
        b: T.StridedTensor((n, k), (b_stride, 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor((num_words, n), (b_sf_stride, 1), "int32"),
        ends: T.Tensor((num_groups,), "int32"),
        c: T.StridedTensor((num_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=256) as block:
            a_tile = T.alloc_shared((NUM_STAGES, BLOCK, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((NUM_STAGES, BLOCK, BLOCK_K), "float8_e4m3fn")
            a_words = T.alloc_shared((NUM_STAGES, BLOCK), "int32")
            b_words = T.alloc_shared((NUM_STAGES, BLOCK), "int32")
            sums = T.alloc_tmem([BLOCK, BLOCK], "float32")
            a_factors = T.alloc_tmem([BLOCK, 4], "int32")
            b_factors = T.alloc_tmem([BLOCK, 4], "int32")
            full = T.alloc_barrier([1] * NUM_STAGES)
            arranged = T.alloc_barrier([32] * NUM_STAGES)
            empty = T.alloc_barrier([1] * NUM_STAGES)
            summed = T.alloc_barrier([1])
            taken = T.alloc_barrier([128])
            place = T.alloc_local((K_PLACE_SIZE,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            total = num_groups * T.ceildiv(m, BLOCK) * T.ceildiv(n, BLOCK)
            num_turns = T.truncdiv(total - block + num_blocks - 1, num_blocks)
            thread = T.get_thread_binding()
            for turn in T.serial(num_turns):
                find_k_tile(block + turn * num_blocks, total, ends, m, n, k, BLOCK, BLOCK, BLOCK_K, place)
                if thread < 32:
                    for index in T.serial(place[NUM_STEPS]):
                        T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                        step = place[FIRST_STEP] + index
                        rows = slice(place[ROW], place[ROW] + BLOCK)
                        cols = slice(place[COL], place[COL] + BLOCK)
                        channels = slice(step * BLOCK_K, (step + 1) * BLOCK_K)
                        if index == 0 or step % 4 == 0:
                            for source, target in ((a_sf[step // 4, rows], a_words), (b_sf[step // 4, cols], b_words)):
                                T.tma_copy(source, target[slot[0], :], barrier=full[slot[0]], leader_scope_threads=32)
                        for source, target in ((a[rows, channels], a_tile), (b[cols, channels], b_tile)):
                            T.tma_copy(source, target[slot[0], :, :], barrier=full[slot[0]], leader_scope_threads=32)
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive(full[slot[0]])
                        steps.next_slot(slot, NUM_STAGES)
                elif thread < 64:
                    for index in T.serial(place[NUM_STEPS]):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        if index == 0 or (place[FIRST_STEP] + index) % 4 == 0:
                            own.arrange(a_words, slot[0])
                            own.arrange(b_words, slot[0])
                            T.fence_proxy_async()
                        T.mbarrier_arrive(arranged[slot[0]])
                        steps.next_slot(slot, NUM_STAGES)
                elif thread < 96:
                    T.mbarrier_wait_parity(taken, turn % 2 ^ 1)
                    for index in T.serial(place[NUM_STEPS]):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        T.mbarrier_wait_parity(arranged[slot[0]], slot[1])
                        step = place[FIRST_STEP] + index
                        if index == 0 or step % 4 == 0:
                            T.tcgen05_cp_warpx4(a_words[slot[0], :], a_factors)
                            T.tcgen05_cp_warpx4(b_words[slot[0], :], b_factors)
                        factors = (a_factors, b_factors)
                        own.multiply(a_tile, b_tile, 0, sums, factors, slot[0], step, index == 0, empty)
                        steps.next_slot(slot, NUM_STAGES)
                    T.tcgen05_mma_arrive(summed)
                elif thread >= 128:
                    acc = T.alloc_fragment((BLOCK, PIECE), "float32")
                    T.mbarrier_wait_parity(summed, turn % 2)
                    for first in T.unroll(0, BLOCK, PIECE):
                        if place[NUM_STEPS] > 0:
                            T.copy(sums[:, first : first + PIECE], acc)
                        else:  # Nothing was multiplied: tensor memory has another tile's sums.
                            T.clear(acc)
                        own.finish(acc, c if with_c else None, None, m, n, place, first)
                        own.store("k", acc, m, n, place, first, d)
                    T.mbarrier_arrive(taken)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
