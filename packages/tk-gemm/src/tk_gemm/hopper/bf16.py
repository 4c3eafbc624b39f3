"""The BF16 products' kernel: persistent thread blocks of warps for the ring and one or two multiplying warpgroups.

    load        1 or 2 warps  find tiles; 64 channels of A and B a step, by TMA, into a ring
    write       one warp      finds the same tiles, and puts their coordinates into the ring
    multiply    warpgroups    64 rows each: sums stay in the accumulators, in registers, through all of K

Tiles are found and results stored as in the FP8 products (fp8.py).
"""

from functools import partial
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BF16_STEP_K, PASS_CONFIGS, Addend, Kind, strides


@kernel(pass_configs=PASS_CONFIGS)
def bf16_product_kernel(
    kind: Kind,
    shape: TileShape,
    d_dtype: torch.dtype,
    a_is_transposed: bool,
    b_is_transposed: bool,
    addend: Addend | None,
    arch: Arch,
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A lies as (groups, M, K), transposed as (groups, K, M), and B as (groups, N, K), transposed as (groups, K, N).
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import bf16_operands, scheduler
    from tk_gemm.hopper import bf16_loop, epilogue, roles

    by_k = kind == "k"
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    layout_size = T.dynamic("layout_size")
    num_d_groups = layout_size if by_k else num_a_groups
    a_shape = (k, m) if a_is_transposed else (m, k)
    b_shape = (k, n) if b_is_transposed else (n, k)

    @T.macro
    def multiply(share: bf16_loop.Share, end: epilogue.Epilogue, layout: T.Buffer) -> None:
        tile = scheduler.local_tile()
        acc = T.alloc_fragment((64, shape.warpgroup_n), "float32")
        ring.wait_full(share.ring)
        ring.receive(tile, share.stages.tile, share.ring.stage[0])
        while tile.row[0] >= 0:
            bf16_loop.sum_up(share, tile, acc, lambda: epilogue.find_rows(end, layout, tile))
            epilogue.store(end, tile, acc, 0)
            ring.receive(tile, share.stages.tile, share.ring.stage[0])
        T.tma_store_wait(0)

    @T.prim_func
    def product(
        a: T.StridedTensor((num_a_groups, *a_shape), (*strides("a"), 1), "bfloat16"),
        b: T.StridedTensor((num_b_groups, *b_shape), (*strides("b"), 1), "bfloat16"),
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides("c"), 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides("d"), 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        if shape.on_demand:
            taken = T.arg("taken", T.Tensor((1,), "int32"))

        with T.Kernel(num_blocks, threads=128 * shape.num_warpgroups + 128) as block:
            x = bf16_operands.Operands(a, b, a_is_transposed, b_is_transposed, by_k)
            stages = bf16_loop.stages(shape, x)
            out = T.alloc_shared(epilogue.out_shape(shape, d_dtype), d_dtype)
            sides = shape.sides(addend)
            r = ring.ring(shape.num_stages, len(sides) + 1, 4 * shape.num_warpgroups)
            sums = epilogue.handed_over(shape, out) if addend == "d" else None
            demand = scheduler.demand(taken, len(sides) + 1, 4 * shape.num_warpgroups) if shape.on_demand else None
            sizes, tile_shape = (m, n, k, num_b_groups), (shape.block_m, shape.block_n, BF16_STEP_K)
            warps = [partial(bf16_loop.load, shape=shape, x=x, to=stages, r=r, sides=each) for each in sides]
            warps.append(lambda s: scheduler.send_tiles(r, s, stages.tile))
            if addend == "d":
                warps += epilogue.adding_warps(shape, sums, d)
            roles.split(
                shape.num_warpgroups,
                block,
                lambda w: multiply(
                    bf16_loop.Share(shape.corner(w), x, stages, r),
                    epilogue.epilogue(w, shape, kind, out, d, c if addend == "c" else None, sums),
                    layout,
                ),
                lambda: scheduler.scheduler(kind, layout, sizes, tile_shape, num_blocks, demand),
                warps,
            )

    return product
