"""The kernel of an expert's first FP8 product with SwiGLU and the cast to e4m3: fp8.py with another end.

    tile of 128 × 256    128 columns of the gate, and the same 128 of up
    epilogue             out = gate / (1 + exp(-gate)) * up * weight;  for each row: amax, factor, 128 codes

A row's 128 outputs are in four lanes of one warp, so their amax takes two shuffles and no shared memory.
"""

from typing import Any, Literal

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BLOCK_K, PASS_CONFIGS, stride, strides


@kernel(pass_configs=PASS_CONFIGS)
def fp8_swiglu_product_kernel(
    kind: Literal["ids", "psum"],
    shape: TileShape,
    a_sf_by_tma: bool,
    with_weights: bool,
    with_clamp: bool,
    arch: Arch,
) -> Any:
    """As fp8_product_kernel, of interleaved B (groups, 2 · I, K), to data (1, M, I) and factors (I/128, M)."""
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import scheduler, swiglu
    from tk_gemm.hopper import epilogue, fp8_loop, roles

    m, n, k, num_groups, num_cols = (T.dynamic(x) for x in ("m", "n", "k", "num_groups", "num_cols"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    num_blocks_of_cols, num_weights = T.dynamic("num_blocks_of_cols"), T.dynamic("num_weights")
    sf_row_stride = 1 if a_sf_by_tma else stride("a_sf_row_stride")

    @T.macro
    def multiply(
        share: fp8_loop.Share,
        end: epilogue.Epilogue,
        layout: T.Buffer,
        weights: tuple[T.Buffer, T.Buffer],
        clamp: T.PrimExpr,
        sf: T.Buffer,
    ) -> None:
        tile = scheduler.local_tile()
        part, gate, up = (T.alloc_fragment((64, 128), "float32") for _ in range(3))
        weight = T.alloc_fragment((64,), "float32") if with_weights else None
        ring.wait_full(share.ring)
        ring.receive(tile, share.stages.tile, share.ring.stage[0])
        while tile.row[0] >= 0:
            epilogue.find_rows(end, layout, tile)
            rows = swiglu.Rows(tile.row[0] + end.corner[0], m, end.is_row)
            if with_weights:
                swiglu.find_weights(rows, *weights, weight)
            fp8_loop.sum_in_turn(share, tile, part, (gate, up), None)
            swiglu.activate(gate, up, weight, clamp if with_clamp else None)
            tile.col[0] = tile.col[0] // 2
            swiglu.quantize(rows, gate, part, sf, tile.col[0] // 128)
            epilogue.store(end, tile, gate, 0)
            ring.receive(tile, share.stages.tile, share.ring.stage[0])
        T.tma_store_wait(0)

    @T.prim_func
    def product(
        a: T.StridedTensor((1, m, k), (*strides("a"), 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((1, num_steps, m), (*strides("a_sf"), sf_row_stride), "float32"),
        b: T.StridedTensor((num_groups, n, k), (*strides("b"), 1), "float8_e4m3fn"),
        b_sf: T.Tensor((num_factors,), "float32"),
        layout: T.Tensor((layout_size,), "int32"),
        pos: T.Tensor((m,), "int32"),
        weights: T.Tensor((num_weights,), "float32"),
        data: T.StridedTensor((1, m, num_cols), (*strides("data"), 1), "float8_e4m3fn"),
        sf: T.StridedTensor((num_blocks_of_cols, m), (stride("out_sf_stride"), 1), "float32"),
        clamp: T.float32,
        num_blocks: T.int32,
    ) -> None:
        if shape.on_demand:
            taken = T.arg("taken", T.Tensor((1,), "int32"))

        with T.Kernel(num_blocks, threads=384) as block:
            x = fp8_loop.Operands(a, a_sf, b, b_sf, a_sf_by_tma, False)
            stages = fp8_loop.stages(shape, False)
            out = T.alloc_shared((1, shape.block_m, 128), "float8_e4m3fn")  # A tile's codes are one piece.
            r = ring.ring(shape.num_stages, 2, 4 * shape.num_warpgroups)  # The loading and the writing warp fill it.
            demand = scheduler.demand(taken, 2, 4 * shape.num_warpgroups) if shape.on_demand else None
            sizes, tile_shape = (m, n, k, num_groups), (shape.block_m, shape.block_n, BLOCK_K)
            roles.split(
                shape.num_warpgroups,
                block,
                lambda w: multiply(
                    fp8_loop.share(w, shape, x, stages, r),
                    epilogue.epilogue(w, shape, kind, out, data),
                    layout,
                    (pos, weights),
                    clamp,
                    sf,
                ),
                lambda: scheduler.scheduler(kind, layout, sizes, tile_shape, num_blocks, demand),
                (
                    lambda s: fp8_loop.load(s, shape, x, stages, r, "ab"),
                    lambda s: fp8_loop.write(s, shape, x, stages, r),
                ),
            )

    return product
