"""The FP8 products' kernel: persistent thread blocks of warps for the ring and one or two multiplying warpgroups.

    load        1 or 2 warps  find tiles; 128 channels of A, B and A's factors a step, by TMA, into a ring
    write       one warp      finds the same tiles; B's factors and the tiles' coordinates, into the ring
    multiply    warpgroups    64 rows each: the tensor core's sum of 128 channels, then acc = fma(factor, sum, acc)

docs/tuning/gemm.md has measurements.
"""

from functools import partial
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.hopper.tiles import TileShape
from tk_gemm.kernels import BLOCK_K, PASS_CONFIGS, Addend, Kind, stride, strides


@kernel(pass_configs=PASS_CONFIGS)
def fp8_product_kernel(
    kind: Kind, shape: TileShape, d_dtype: torch.dtype, a_sf_by_tma: bool, addend: Addend | None, arch: Arch
) -> Any:
    """D = A·Bᵀ (+ C) for one way to find a tile's rows and weights; shapes and strides are known only at run time.

    A's factors come by TMA where they are column major on 16 bytes, else by plain loads from any strides. B's are
    flat (groups, ⌈N/128⌉, steps), or with groups along K as A's, for each row. With kind "k_flat" A and B are what
    `group_maps_kernel` writes.
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm import scheduler
    from tk_gemm.hopper import epilogue, fp8_loop, roles

    is_flat, by_k, width = kind == "k_flat", kind in ("k", "k_flat"), shape.warpgroup_n
    kind = "k" if by_k else kind
    # Half of the results during the last product of the other half, where that spills no registers.
    stores_early = width == 256 and d_dtype is torch.bfloat16 and a_sf_by_tma and addend is None
    m, n, k, num_a_groups, num_b_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_a_groups", "num_b_groups"))
    num_steps, layout_size, num_factors = (T.dynamic(x) for x in ("num_steps", "layout_size", "num_factors"))
    num_d_groups = layout_size if by_k else num_a_groups
    a_type = T.StridedTensor((num_a_groups, m, k), (*strides("a"), 1), "float8_e4m3fn")
    b_type = T.StridedTensor((num_b_groups, n, k), (*strides("b"), 1), "float8_e4m3fn")
    if is_flat:
        a_type, b_type = (T.Tensor((layout_size, 16), "int64") for _ in range(2))
        k = num_steps * BLOCK_K
    a_sf_type = T.StridedTensor(
        (num_a_groups, num_steps, m), (*strides("a_sf"), 1 if a_sf_by_tma else stride("a_sf_row_stride")), "float32"
    )
    b_sf_type = T.Tensor((num_factors,), "float32")
    if by_k:
        b_sf_type = T.StridedTensor((num_b_groups, num_steps, n), (*strides("b_sf"), 1), "float32")

    @T.macro
    def multiply(share: fp8_loop.Share, end: epilogue.Epilogue, layout: T.Buffer) -> None:
        tile = scheduler.local_tile()
        part = T.alloc_fragment((64, 128 if width == 256 else width), "float32")
        acc = T.alloc_fragment(part.shape, "float32")
        other = T.alloc_fragment(part.shape, "float32") if width != 192 else None
        ring.wait_full(share.ring)
        ring.receive(tile, share.stages.tile, share.ring.stage[0])
        while tile.row[0] >= 0:
            epilogue.find_rows(end, layout, tile)
            if width <= 128:
                fp8_loop.sum_ahead(share, tile, part, other, acc)
            else:
                at_last_product = partial(epilogue.store, end, tile, acc, 0) if stores_early else None
                fp8_loop.sum_in_turn(share, tile, part, (acc, other) if width == 256 else (acc,), at_last_product)
            if not stores_early:
                epilogue.store(end, tile, acc, 0)
            if width == 256:
                epilogue.store(end, tile, other, 128)
            ring.receive(tile, share.stages.tile, share.ring.stage[0])
        T.tma_store_wait(0)

    @T.prim_func
    def product(
        a: a_type,
        a_sf: a_sf_type,
        b: b_type,
        b_sf: b_sf_type,
        layout: T.Tensor((layout_size,), "int32"),
        c: T.StridedTensor((num_d_groups, m, n), (*strides("c"), 1), d_dtype),
        d: T.StridedTensor((num_d_groups, m, n), (*strides("d"), 1), d_dtype),
        num_blocks: T.int32,
    ) -> None:
        if shape.on_demand:
            taken = T.arg("taken", T.Tensor((1,), "int32"))

        with T.Kernel(num_blocks, threads=128 * shape.num_warpgroups + 128) as block:
            stages = fp8_loop.stages(shape, by_k)
            out = T.alloc_shared(epilogue.out_shape(shape, d_dtype), d_dtype)
            sides = shape.sides(addend)
            r = ring.ring(shape.num_stages, len(sides) + 1, 4 * shape.num_warpgroups)
            x = fp8_loop.Operands(a, a_sf, b, b_sf, a_sf_by_tma, by_k, is_flat)
            sums = epilogue.handed_over(shape, out) if addend == "d" else None
            demand = scheduler.demand(taken, len(sides) + 1, 4 * shape.num_warpgroups) if shape.on_demand else None
            sizes, tile_shape = (m, n, k, num_b_groups), (shape.block_m, shape.block_n, BLOCK_K)
            warps = [partial(fp8_loop.load, shape=shape, x=x, to=stages, r=r, sides=each) for each in sides]
            warps.append(partial(fp8_loop.write, shape=shape, x=x, to=stages, r=r))
            if addend == "d":
                warps += epilogue.adding_warps(shape, sums, d)
            roles.split(
                shape.num_warpgroups,
                block,
                lambda w: multiply(
                    fp8_loop.share(w, shape, x, stages, r),
                    epilogue.epilogue(w, shape, kind, out, d, c if addend == "c" else None, sums),
                    layout,
                ),
                lambda: scheduler.scheduler(kind, layout, sizes, tile_shape, num_blocks, demand),
                warps,
            )

    return product
