"""The BF16 products' kernel on Hopper: persistent thread blocks of one loading warp and two multiplying warpgroups.

    load        one warp          64 channels of A and B a step, by TMA, into a ring in shared memory
    multiply    two warpgroups    sums stay in the accumulators, in registers, through all of K

Thread block b takes tiles b, b + num_blocks, … of D, of block_m × block_n. The warpgroups split the rows of a tile of
128, or the columns of one of 64 rows. A step's product begins before the one before it is done, so the tensor core
never waits for the next instruction. Tiles are found and stored as in the FP8 products.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.bf16_product_config import STEP_K, Kind
from tk_gemm.lib.fp8_product import NUM_CONSUMERS, PASS_CONFIGS
from tk_gemm.lib.fp8_product_config import ProductConfig, out_shape


@kernel(pass_configs=PASS_CONFIGS)
def bf16_product_kernel(
    kind: Kind,
    config: ProductConfig,
    d_dtype: torch.dtype,
    a_is_transposed: bool,
    b_is_transposed: bool,
    with_c: bool,
    arch: Arch,
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A lies as (G, M, K), transposed as (G, K, M), and B as (groups, N, K), transposed as (groups, K, N).
    """
    import tilelang.language as T

    from tk_gemm.lib import bf16_product_steps as own
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.k_grouped_steps import K_PLACE_SIZE, NUM_STEPS

    block_m, block_n, num_stages = config.block_m, config.block_n, config.num_stages
    transposed = (a_is_transposed, b_is_transposed)
    of_k, is_padded = kind == "k", kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    layout_size = T.dynamic("layout_size")
    num_d_groups = layout_size if of_k else num_a_groups
    strides = {x: steps.strides(x) for x in ("a", "b", "c", "d")}
    a_shape, a_step = ((k, m), (STEP_K, block_m)) if a_is_transposed else ((m, k), (block_m, STEP_K))
    b_shape, b_step = ((k, n), (STEP_K, block_n)) if b_is_transposed else ((n, k), (block_n, STEP_K))

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, *a_shape), (*strides["a"], 1), "bfloat16"),
        b: T.StridedTensor((num_b_groups, *b_shape), (*strides["b"], 1), "bfloat16"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=NUM_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, *a_step), "bfloat16")
            b_tile = T.alloc_shared((num_stages, *b_step), "bfloat16")
            out = T.alloc_shared(out_shape(config, d_dtype), d_dtype)
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([NUM_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((K_PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            own.count(kind, layout, m, n, num_a_groups, block_m, block_n, total)
            tile[0] = block
            own.find(kind, tile, num_blocks, total[0], layout, m, n, k, num_b_groups, block_m, block_n, place)
            thread = T.get_thread_binding()
            if thread < NUM_CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((K_PLACE_SIZE,), "int32")
                before = T.alloc_local((1,), "int32")  # The stage of the step before, still in use.
                acc = T.alloc_fragment((block_m, block_n), "float32")
                is_row = T.alloc_fragment((block_m,), "int32") if is_padded else None
                while tile[0] < total[0]:
                    for x in T.unroll(K_PLACE_SIZE):
                        here[x] = place[x]
                    num_steps = here[NUM_STEPS] if of_k else T.truncdiv(k, STEP_K)
                    if is_padded:
                        steps.find_rows(kind, layout, m, here, is_row)
                    if of_k and num_steps == 0:
                        T.clear(acc)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        own.multiply(a_tile, b_tile, slot[0], transposed, step == 0, acc)
                        T.wait_wgmma(1)
                        if step > 0 and T.shuffle_elect(32):
                            T.mbarrier_arrive(empty[before[0]])
                        before[0] = slot[0]
                        steps.next_slot(slot, num_stages)
                    tile[0] = tile[0] + num_blocks
                    own.find(kind, tile, num_blocks, total[0], layout, m, n, k, num_b_groups, block_m, block_n, place)
                    T.wait_wgmma(0)
                    if num_steps > 0 and T.shuffle_elect(32):
                        T.mbarrier_arrive(empty[before[0]])
                    steps.finish(acc, c if with_c else None, is_row, m, n, here, 0)
                    T.tma_store_wait(0)  # An odd number of pieces ends in the buffer that the next tile begins with.
                    steps.store(kind, acc, n, here, 0, out, d)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < NUM_CONSUMERS + 32:
                    while tile[0] < total[0]:
                        for step in T.serial(place[NUM_STEPS] if of_k else T.truncdiv(k, STEP_K)):
                            T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                            own.load(kind, a, b, a_tile, b_tile, full, slot[0], place, step, transposed)
                            steps.next_slot(slot, num_stages)
                        tile[0] = tile[0] + num_blocks
                        own.find(
                            kind, tile, num_blocks, total[0], layout, m, n, k, num_b_groups, block_m, block_n, place
                        )

    return product
