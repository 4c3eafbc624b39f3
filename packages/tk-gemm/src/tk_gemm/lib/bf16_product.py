"""The BF16 products' kernel on Hopper: persistent thread blocks of one loading warp and two multiplying warpgroups.

    load        one warp          64 channels of A and B a step, by TMA, into a ring in shared memory
    multiply    two warpgroups    64 rows each; sums stay in the tensor core's accumulators through all of K

A thread block takes one tile of 128 × block_n of D after the other, every `num_blocks`-th of all. A step's product
begins before the one before it is done, so the tensor core never waits for the next instruction. A tile is stored in
parts of 128 bytes a row, through two buffers: one is filled while TMA empties the other.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.bf16_product_config import STEP_K, Kind, part_cols
from tk_gemm.lib.fp8_product_config import BLOCK_M, ProductConfig

_CONSUMERS = 256
"""Threads of the multiplying warpgroups; a third warpgroup follows, of which one warp loads."""
_STORE_BARRIER = 4
"""Number of the hardware barrier of the multiplying warps; TileLang takes 1 to 3 itself."""

_PASS_CONFIGS = {
    # The ring's barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared here, as in the FP8 products.
    "tl.disable_safe_memory_legalize": True,
}


@kernel(pass_configs=_PASS_CONFIGS)
def bf16_product_kernel(
    kind: Kind,
    config: ProductConfig,
    d_dtype: torch.dtype,
    a_is_transposed: bool,
    b_is_transposed: bool,
    with_c: bool,
    arch: Arch,
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known at run time alone.

    A lies as (G, M, K), transposed as (G, K, M), and B as (groups, N, K), transposed as (groups, K, N).
    """
    import tilelang.language as T

    from tk_gemm.lib import bf16_product_steps as own
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib.fp8_product_steps import B_GROUP, PLACE_SIZE

    block_n, num_stages = config.block_n, config.num_stages
    part_n = part_cols(d_dtype)
    is_transposed = (a_is_transposed, b_is_transposed)
    is_padded = kind in ("ids", "psum")
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    layout_size = T.dynamic("layout_size")
    strides = {x: (T.dynamic(f"{x}_group_stride"), T.dynamic(f"{x}_stride")) for x in ("a", "b", "c", "d")}
    a_shape, a_step = ((k, m), (STEP_K, BLOCK_M)) if a_is_transposed else ((m, k), (BLOCK_M, STEP_K))
    b_shape, b_step = ((k, n), (STEP_K, block_n)) if b_is_transposed else ((n, k), (block_n, STEP_K))

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, *a_shape), (*strides["a"], 1), "bfloat16"),
        b: T.StridedTensor((num_b_groups, *b_shape), (*strides["b"], 1), "bfloat16"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_a_groups, m, n), (*strides["c"], 1), d_dtype),
        d: T.StridedTensor((num_a_groups, m, n), (*strides["d"], 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=_CONSUMERS + 128) as block:
            a_tile = T.alloc_shared((num_stages, *a_step), "bfloat16")
            b_tile = T.alloc_shared((num_stages, *b_step), "bfloat16")
            out = T.alloc_shared((2, BLOCK_M, part_n), d_dtype)
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([_CONSUMERS // 32] * num_stages)
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            T.clear(slot)
            T.clear(place)
            num_steps = T.truncdiv(k, STEP_K)
            steps.num_tiles(kind, layout, m, n, num_a_groups, block_n, total)
            num_turns = T.truncdiv(total[0] - block + num_blocks - 1, num_blocks)
            thread = T.get_thread_binding()
            if thread < _CONSUMERS:
                T.set_max_nreg(232, 1)
                here = T.alloc_local((PLACE_SIZE,), "int32")
                before = T.alloc_local((1,), "int32")  # The stage that the step before reads.
                acc = T.alloc_fragment((BLOCK_M, block_n), "float32")
                is_row = T.alloc_fragment((BLOCK_M,), "int32") if is_padded else None
                steps.find_tile(kind, block, total[0], layout, m, n, num_b_groups, block_n, place)
                for turn in T.serial(num_turns):
                    for x in T.unroll(PLACE_SIZE):
                        here[x] = place[x]
                    if here[B_GROUP] >= 0:
                        if is_padded:
                            steps.find_rows(kind, layout, m, here, is_row)
                        for step in T.serial(num_steps):
                            T.mbarrier_wait_parity(full[slot[0]], slot[1])
                            own.multiply(a_tile, b_tile, slot[0], is_transposed, step == 0, acc)
                            T.wait_wgmma(1)
                            if step > 0 and T.shuffle_elect(32):
                                T.mbarrier_arrive(empty[before[0]])
                            before[0] = slot[0]
                            steps.next_slot(slot, num_stages)
                        T.wait_wgmma(0)
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive(empty[before[0]])
                    next_tile = block + (turn + 1) * num_blocks
                    steps.find_tile(kind, next_tile, total[0], layout, m, n, num_b_groups, block_n, place)
                    if here[B_GROUP] >= 0:
                        own.finish(acc, c if with_c else None, is_row, m, n, here)
                        T.tma_store_wait(0)
                        for part in T.unroll(block_n // part_n):
                            T.tma_store_wait(1)
                            T.sync_threads(_STORE_BARRIER, _CONSUMERS)
                            T.copy(acc[:, part * part_n : (part + 1) * part_n], out[part % 2, :, :])
                            T.fence_proxy_async()
                            T.sync_threads(_STORE_BARRIER, _CONSUMERS)
                            own.store_part(kind, out, part, d, n, here)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(40, 0)
                if thread < _CONSUMERS + 32:
                    for turn in T.serial(num_turns):
                        tile = block + turn * num_blocks
                        steps.find_tile(kind, tile, total[0], layout, m, n, num_b_groups, block_n, place)
                        if place[B_GROUP] >= 0:
                            for step in T.serial(num_steps):
                                T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                                own.load(a, b, a_tile, b_tile, full, slot[0], place, step, is_transposed)
                                steps.next_slot(slot, num_stages)

    return product
