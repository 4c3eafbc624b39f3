"""The FP8 products' kernel on Blackwell, whose tensor cores take the scale factors: packed UE8M0, a byte a block.

    load        one warp      128 channels of A and B a step, and every fourth step a word of factors a row, by TMA
    arrange     one warp      puts words into the order of tensor memory; reads those of B's 128 × 128 blocks itself
    multiply    one warp      copies words to tensor memory, then one block-scaled product a step, summed there
    store       four warps    a tile's sums, with C added

The kernel is compiled for sm_100a and sm_103a, and has not run: there was no such GPU.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import PASS_CONFIGS
from tk_gemm.lib.fp8_product_config import BLOCK_K, Kind

BLOCK = 128
"""Rows and columns of a tile, and channels of a factor."""
NUM_STAGES = 6
PIECE = 32
"""Columns that a thread has in registers at a time."""


@kernel(pass_configs=PASS_CONFIGS)
def fp8_product_blackwell_kernel(kind: Kind, d_dtype: torch.dtype, b_is_per_row: bool, with_c: bool, arch: Arch) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    Words of factors are (groups, words, M) for A's rows, and for B's (groups, words, N) or (groups, words, ⌈N/128⌉).
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_blackwell_steps as own
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import PLACE_SIZE

    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_words, num_b_factors, layout_size = (T.dynamic(x) for x in ("num_words", "num_b_factors", "layout_size"))
    names = ("a", "b", "c", "d", "a_sf", "b_sf")
    strides = {x: steps.strides(x) for x in names}
    b_sf_stride = 1 if b_is_per_row else steps.stride("b_sf_row_stride")

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, m, k), (*strides["a"], 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_a_groups, num_words, m), (*strides["a_sf"], 1), "int32"),
        b: T.StridedTensor((num_b_groups, n, k), (*strides["b"], 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor((num_b_groups, num_words, num_b_factors), (*strides["b_sf"], b_sf_stride), "int32"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_a_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_a_groups, m, n), (*strides["d"], 1), d_dtype),
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
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            turn = T.alloc_local((1,), "int32")  # Parity of the number of tiles that are done.
            T.clear(slot)
            T.clear(turn)
            T.clear(place)
            num_steps = T.ceildiv(k, BLOCK_K)
            steps.num_tiles(kind, layout, m, n, num_a_groups, BLOCK, BLOCK, total)
            tile[0] = block
            thread = T.get_thread_binding()
            steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, BLOCK, BLOCK, place)
            while tile[0] < total[0]:
                if thread < 32:
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                        if step % 4 == 0:
                            own.load_words(a_sf, a_words, full, slot[0], place[steps.A_GROUP], place[steps.ROW], step)
                            if b_is_per_row:
                                own.load_words(
                                    b_sf, b_words, full, slot[0], place[steps.B_GROUP], place[steps.COL], step
                                )
                        steps.load(a, b, a_tile, b_tile, full, slot[0], place, step)
                        steps.next_slot(slot, NUM_STAGES)
                elif thread < 64:
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        if step % 4 == 0:
                            own.arrange(a_words, slot[0])
                            if b_is_per_row:
                                own.arrange(b_words, slot[0])
                            else:
                                own.repeat_word(b_sf, b_words, slot[0], place, n, 0, step)
                            T.fence_proxy_async()
                        T.mbarrier_arrive(arranged[slot[0]])
                        steps.next_slot(slot, NUM_STAGES)
                elif thread < 96:
                    T.mbarrier_wait_parity(taken, turn[0] ^ 1)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        T.mbarrier_wait_parity(arranged[slot[0]], slot[1])
                        if step % 4 == 0:
                            T.tcgen05_cp_warpx4(a_words[slot[0], :], a_factors)
                            T.tcgen05_cp_warpx4(b_words[slot[0], :], b_factors)
                        factors = (a_factors, b_factors)
                        own.multiply(a_tile, b_tile, 0, sums, factors, slot[0], step, step == 0, empty)
                        steps.next_slot(slot, NUM_STAGES)
                    T.tcgen05_mma_arrive(summed)
                elif thread >= 128:
                    acc = T.alloc_fragment((BLOCK, PIECE), "float32")
                    is_row = T.alloc_fragment((BLOCK,), "int32") if is_padded else None
                    if is_padded:
                        steps.find_rows(kind, layout, m, place, is_row)
                    T.mbarrier_wait_parity(summed, turn[0])
                    for first in T.unroll(0, BLOCK, PIECE):
                        T.copy(sums[:, first : first + PIECE], acc)
                        own.finish(acc, c if with_c else None, is_row, m, n, place, first)
                        own.store(kind, acc, m, n, place, first, d)
                    T.mbarrier_arrive(taken)
                turn[0] = turn[0] ^ 1
                tile[0] = tile[0] + num_blocks
                steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_b_groups, BLOCK, BLOCK, place)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
