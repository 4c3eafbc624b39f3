"""The BF16 products' kernel on Blackwell, whose tensor cores keep sums in tensor memory.

    load        one warp      64 channels of A and B a step, by TMA, into a ring in shared memory
    multiply    one warp      one product a step, summed in tensor memory
    store       four warps    a tile's sums, with C added

All of them find the tiles themselves.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.blackwell.tiles import BLOCK, THREADS
from tk_gemm.kernels import BF16_STEP_K, PASS_CONFIGS, Kind, strides

_NUM_STAGES = 6


@kernel(pass_configs=PASS_CONFIGS)
def bf16_product_blackwell_kernel(
    kind: Kind, d_dtype: torch.dtype, a_is_transposed: bool, b_is_transposed: bool, with_c: bool, arch: Arch
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A lies as (G, M, K), transposed as (G, K, M), and B as (groups, N, K), transposed as (groups, K, N).
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import bf16_operands, scheduler
    from tk_gemm.blackwell import epilogue, sums

    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    layout_size = T.dynamic("layout_size")
    num_d_groups = layout_size if kind == "k" else num_a_groups
    a_shape, b_shape = (k, m) if a_is_transposed else (m, k), (k, n) if b_is_transposed else (n, k)

    @T.macro
    def multiply(tile: scheduler.Tile, a_stages: T.Buffer, b_stages: T.Buffer, r: ring.Ring, s: sums.Sums) -> None:
        # In the multiplying warp: begin a tile's products, the first of which begins the sums.
        T.mbarrier_wait_parity(s.taken[0], s.parity[0] ^ 1)
        for index in T.serial(tile.num_steps[0]):
            ring.wait_full(r)
            T.tcgen05_gemm(
                a_stages[r.stage[0], :, :],
                b_stages[r.stage[0], :, :],
                s.parts[0],
                transpose_A=a_is_transposed,
                transpose_B=not b_is_transposed,
                mbar=r.empty[r.stage[0]],
                clear_accum=index == 0,
            )
            ring.move_on(r)
        T.tcgen05_mma_arrive(s.summed[0])

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, *a_shape), (*strides("a"), 1), "bfloat16"),
        b: T.StridedTensor((num_b_groups, *b_shape), (*strides("b"), 1), "bfloat16"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides("c"), 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides("d"), 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=THREADS) as block:
            x = bf16_operands.Operands(a, b, a_is_transposed, b_is_transposed, kind == "k")
            stages = bf16_operands.stages(x, _NUM_STAGES, BLOCK, BLOCK)
            acc = sums.sums(1)
            r = ring.ring(_NUM_STAGES, 1, 1)  # The product itself releases a stage.
            results = epilogue.Results(kind, layout, c if with_c else None, d)
            s = scheduler.scheduler(kind, layout, (m, n, k, num_b_groups), (BLOCK, BLOCK, BF16_STEP_K), num_blocks)
            thread = T.get_thread_binding()
            scheduler.start(s, block)
            while s.index[0] < s.total[0]:
                if thread < 32:
                    bf16_operands.load(s.tile, x, BLOCK, BLOCK, *stages, r, "ab")
                elif thread < 64:
                    multiply(s.tile, *stages, r, acc)
                elif thread >= 128:
                    epilogue.store(results, s.tile, acc)
                acc.parity[0] = acc.parity[0] ^ 1
                scheduler.next_tile(s)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
