"""The BF16 products' kernel on Blackwell, whose tensor cores keep sums in tensor memory.

    load        one warp      64 channels of A and B a step, by TMA, into a ring in shared memory
    multiply    one warp      one product a step, summed in tensor memory
    store       four warps    a tile's sums, with C added

Tiles are found as on Hopper. The kernel is compiled for sm_100a and sm_103a, and has not run: there was no such GPU.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.bf16_product_config import STEP_K, Kind
from tk_gemm.lib.fp8_product import PASS_CONFIGS
from tk_gemm.lib.fp8_product_blackwell import BLOCK, NUM_STAGES, PIECE


@kernel(pass_configs=PASS_CONFIGS)
def bf16_product_blackwell_kernel(
    kind: Kind, d_dtype: torch.dtype, a_is_transposed: bool, b_is_transposed: bool, with_c: bool, arch: Arch
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A lies as (G, M, K), transposed as (G, K, M), and B as (groups, N, K), transposed as (groups, K, N).
    """
    import tilelang.language as T

    from tk_gemm.lib import bf16_product_steps as own
    from tk_gemm.lib import fp8_product_blackwell_steps as blackwell
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.k_grouped_steps import K_PLACE_SIZE, NUM_STEPS

    transposed = (a_is_transposed, b_is_transposed)
    of_k, is_padded = kind == "k", kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    layout_size = T.dynamic("layout_size")
    num_d_groups = layout_size if of_k else num_a_groups
    strides = {x: steps.strides(x) for x in ("a", "b", "c", "d")}
    a_shape, a_step = ((k, m), (STEP_K, BLOCK)) if a_is_transposed else ((m, k), (BLOCK, STEP_K))
    b_shape, b_step = ((k, n), (STEP_K, BLOCK)) if b_is_transposed else ((n, k), (BLOCK, STEP_K))

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, *a_shape), (*strides["a"], 1), "bfloat16"),
        b: T.StridedTensor((num_b_groups, *b_shape), (*strides["b"], 1), "bfloat16"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=256) as block:
            a_tile = T.alloc_shared((NUM_STAGES, *a_step), "bfloat16")
            b_tile = T.alloc_shared((NUM_STAGES, *b_step), "bfloat16")
            sums = T.alloc_tmem([BLOCK, BLOCK], "float32")
            full = T.alloc_barrier([1] * NUM_STAGES)
            empty = T.alloc_barrier([1] * NUM_STAGES)
            summed = T.alloc_barrier([1])
            taken = T.alloc_barrier([128])
            place = T.alloc_local((K_PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            turn = T.alloc_local((1,), "int32")  # Parity of the number of tiles that are done.
            T.clear(slot)
            T.clear(turn)
            T.clear(place)
            own.count(kind, layout, m, n, num_a_groups, BLOCK, BLOCK, total)
            tile[0] = block
            thread = T.get_thread_binding()
            own.find(kind, tile, num_blocks, total[0], layout, m, n, k, num_b_groups, BLOCK, BLOCK, place)
            while tile[0] < total[0]:
                num_steps = place[NUM_STEPS] if of_k else T.truncdiv(k, STEP_K)
                if thread < 32:
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                        own.load(kind, a, b, a_tile, b_tile, full, slot[0], place, step, transposed)
                        steps.next_slot(slot, NUM_STAGES)
                elif thread < 64:
                    T.mbarrier_wait_parity(taken, turn[0] ^ 1)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        own.multiply_into_tensor_memory(a_tile, b_tile, slot[0], transposed, step == 0, sums, empty)
                        steps.next_slot(slot, NUM_STAGES)
                    T.tcgen05_mma_arrive(summed)
                elif thread >= 128:
                    acc = T.alloc_fragment((BLOCK, PIECE), "float32")
                    is_row = T.alloc_fragment((BLOCK,), "int32") if is_padded else None
                    if is_padded:
                        steps.find_rows(kind, layout, m, place, is_row)
                    T.mbarrier_wait_parity(summed, turn[0])
                    for first in T.unroll(0, BLOCK, PIECE):
                        if of_k and num_steps == 0:  # Nothing was multiplied: tensor memory has another tile's sums.
                            T.clear(acc)
                        else:
                            T.copy(sums[:, first : first + PIECE], acc)
                        blackwell.finish(acc, c if with_c else None, is_row, m, n, place, first)
                        blackwell.store(kind, acc, m, n, place, first, d)
                    T.mbarrier_arrive(taken)
                turn[0] = turn[0] ^ 1
                tile[0] = tile[0] + num_blocks
                own.find(kind, tile, num_blocks, total[0], layout, m, n, k, num_b_groups, BLOCK, BLOCK, place)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
