"""The FP8 products' kernel on Blackwell, whose tensor cores take the scale factors: packed UE8M0, a byte a block.

    load        one warp      128 channels of A and B a step, and every fourth step a word of factors a row, by TMA
    arrange     one warp      puts words into the order of tensor memory; reads those of B's 128 × 128 blocks itself
    multiply    one warp      copies words to tensor memory, then one block-scaled product a step, summed there
    store       four warps    a tile's sums, with C added

All of them find the tiles themselves.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.blackwell.tiles import BLOCK, THREADS
from tk_gemm.kernels import BLOCK_K, PASS_CONFIGS, Kind, stride, strides

_NUM_STAGES = 6


@kernel(pass_configs=PASS_CONFIGS)
def fp8_product_blackwell_kernel(kind: Kind, d_dtype: torch.dtype, b_is_per_row: bool, with_c: bool, arch: Arch) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    Words of factors are (groups, words, M) for A's rows, and for B's (groups, words, N) or (groups, words, ⌈N/128⌉).
    With kind "k_flat" A and B are loaded by what `group_maps_kernel` writes.
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import scheduler
    from tk_gemm.blackwell import epilogue, fp8_loop, sums

    is_flat = kind == "k_flat"
    kind = "k" if is_flat else kind
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_words, num_b_factors, layout_size = (T.dynamic(x) for x in ("num_words", "num_b_factors", "layout_size"))
    num_d_groups = layout_size if kind == "k" else num_a_groups
    b_sf_shape = (num_b_groups, num_words, n if b_is_per_row else num_b_factors)
    b_sf_strides = (*strides("b_sf"), 1 if b_is_per_row else stride("b_sf_row_stride"))

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, m, k), (*strides("a"), 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((num_a_groups, num_words, m), (*strides("a_sf"), 1), "int32"),
        b: T.StridedTensor((num_b_groups, n, k), (*strides("b"), 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor(b_sf_shape, b_sf_strides, "int32"),
        layout: T.Tensor((layout_size,), "int32"),
        a_maps: T.Tensor((layout_size, 16), "int64"),
        b_maps: T.Tensor((layout_size, 16), "int64"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides("c"), 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides("d"), 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=THREADS) as block:
            stages = fp8_loop.stages(_NUM_STAGES, 1)
            acc = sums.sums(1)
            factors = fp8_loop.factors(1)
            r = ring.ring(_NUM_STAGES, 1, 1)  # The product itself releases a stage.
            maps = (a_maps, b_maps) if is_flat else None
            x = fp8_loop.Operands(a, a_sf, b, b_sf, b_is_per_row, kind == "k", maps)
            results = epilogue.Results(kind, layout, c if with_c else None, d)
            s = scheduler.scheduler(kind, layout, (m, n, k, num_b_groups), (BLOCK, BLOCK, BLOCK_K), num_blocks)
            thread = T.get_thread_binding()
            scheduler.start(s, block)
            while s.index[0] < s.total[0]:
                if thread < 32:
                    fp8_loop.load(s.tile, x, stages, r)
                elif thread < 64:
                    fp8_loop.arrange(s.tile, x, stages, r)
                elif thread < 96:
                    fp8_loop.multiply(s.tile, stages, r, factors, acc)
                elif thread >= 128:
                    epilogue.store(results, s.tile, acc)
                acc.parity[0] = acc.parity[0] ^ 1
                scheduler.next_tile(s)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
