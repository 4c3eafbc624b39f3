"""The kernel on Blackwell of an expert's first FP8 product with SwiGLU and the cast to e4m3: packed UE8M0 throughout.

As fp8.py, for tiles of 128 × 256: 128 columns of the gate and the same 128 of up, each with sums of its own.
"""

from typing import Any, Literal

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.blackwell.tiles import BLOCK, THREADS
from tk_gemm.kernels import BLOCK_K, PASS_CONFIGS, stride, strides

_NUM_STAGES = 4
BLOCK_N = 2 * BLOCK
"""Columns of a tile: gate and up."""


@kernel(pass_configs=PASS_CONFIGS)
def fp8_swiglu_product_blackwell_kernel(
    kind: Literal["ids", "psum"], with_weights: bool, with_clamp: bool, arch: Arch
) -> Any:
    """As fp8_product_blackwell_kernel, of interleaved B (groups, 2 · I, K), to data (M, I) and factors (words, 4 · M).

    Four bytes of factors are the word of a row, for 512 columns.
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import scheduler
    from tk_gemm.blackwell import fp8_loop, sums, swiglu_epilogue

    m, n, k, num_groups, num_cols = (T.dynamic(x) for x in ("m", "n", "k", "num_groups", "num_cols"))
    num_words, num_b_factors, layout_size = (T.dynamic(x) for x in ("num_words", "num_b_factors", "layout_size"))
    num_sf_words, num_weights = T.dynamic("num_sf_words"), T.dynamic("num_weights")
    num_sf_bytes = T.dynamic("num_sf_bytes", "int64")
    b_sf_strides = (*strides("b_sf"), stride("b_sf_row_stride"))

    @T.prim_func
    def product(
        a: T.StridedTensor((1, m, k), (*strides("a"), 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((1, num_words, m), (*strides("a_sf"), 1), "int32"),
        b: T.StridedTensor((num_groups, n, k), (*strides("b"), 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor((num_groups, num_words, num_b_factors), b_sf_strides, "int32"),
        layout: T.Tensor((layout_size,), "int32"),
        pos: T.Tensor((m,), "int32"),
        weights: T.Tensor((num_weights,), "float32"),
        data: T.Tensor((m, num_cols), "float8_e4m3fn"),
        sf: T.StridedTensor((num_sf_words, num_sf_bytes), (stride("sf_stride"), 1), "uint8"),
        clamp: T.float32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=THREADS) as block:
            stages = fp8_loop.stages(_NUM_STAGES, 2)
            acc = sums.sums(2)
            factors = fp8_loop.factors(2)
            r = ring.ring(_NUM_STAGES, 1, 1)  # The second product itself releases a stage.
            x = fp8_loop.Operands(a, a_sf, b, b_sf, False, False)
            maps, limit = (pos, weights) if with_weights else None, clamp if with_clamp else None
            results = swiglu_epilogue.Results(kind, layout, maps, limit, data, sf)
            s = scheduler.scheduler(kind, layout, (m, n, k, num_groups), (BLOCK, BLOCK_N, BLOCK_K), num_blocks)
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
                    swiglu_epilogue.store(results, s.tile, acc)
                acc.parity[0] = acc.parity[0] ^ 1
                scheduler.next_tile(s)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
