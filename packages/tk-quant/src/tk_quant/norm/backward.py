"""norm_backward: gradients of `norm_forward` with respect to x, which is the residual's too, and to the weight.

    x̂ = x · rstd;  g = out_grad · out_scale;  gw = g · (weight + weight_offset);  m = (Σ x̂ · gw) / H
    x_grad = (gw - x̂ · m) · rstd [+ residual_out_grad];  weight_grad = Σ_t x̂ · g

A thread block walks over ranges of rows: one, or as many as a tile has rows where rows are narrow. Its threads hold a
row as in the forward (tile.py), and in float32 the range's part of weight_grad:

    block 0    rows   0 …  30    →  part 0  ┐
    block 1    rows  31 …  61    →  part 1  ├  weight_grad, by a second kernel
        …                                   ┘

Ranges depend on the number of rows, on hidden and on the dtype alone, not on the GPU: the order of every sum is fixed.
Within a range rows are added by fused multiply-adds, ascending; then a block's ranges; then the blocks, in float64.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_quant.norm.arguments import (
    NormOptions,
    check_factors,
    check_rows,
    check_weight,
    check_x,
    folded,
    rows_of_weight,
)
from tk_quant.norm.tile import PART_SEGMENTS, WARP, blocks_per_sm, lanes_of, num_parts, piece_tile


@kernel(pass_configs={**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True})
def _norm_backward_kernel(hidden: int, options: NormOptions, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_quant.cast.tile import layout_of_tile
    from tk_quant.norm import steps

    dtype, config = T.dtype(options.dtype), piece_tile(hidden, options.dtype)
    _, lanes, pieces = lanes_of(hidden, options.dtype)
    num_batches, num_rows, parts = T.dynamic("num_batches"), T.dynamic("num_rows"), T.dynamic("num_parts")
    shape, block_rows, width = (num_batches, num_rows, hidden), config.blocks_down, config.channels

    @T.prim_func
    def norm_backward(
        out_grad: steps.rows_type("out_grad", shape, options.dtype),
        x: steps.rows_type("x", shape, options.dtype),
        weight: steps.weight_type(hidden, options),
        rstd: T.Tensor((num_batches, num_rows), "float32"),
        residual_out_grad: steps.rows_type("residual_out_grad", shape, options.dtype),
        x_grad: T.Tensor(shape, dtype),
        weight_parts: T.Tensor((T.dynamic("num_weights"), parts, hidden), "float32"),
        blocks: T.int32,
        out_scale: T.float32,
        weight_offset: T.float32,
    ) -> None:
        num_groups = num_rows if options.has_rows_of_weight else 1
        rows_of_group = num_batches if options.has_rows_of_weight else num_batches * num_rows
        with T.Kernel(num_groups * blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm(hidden, options.dtype, options.weight_dtype))
            group, part = T.alloc_var("int32"), T.alloc_var("int32")
            group = T.truncdiv(block, blocks)
            part = T.truncmod(block, blocks)
            ranges = steps.RowRanges(part * block_rows, blocks * block_rows, rows_of_group, num_rows)
            xs, grads, others = (T.alloc_fragment(config.tile, dtype) for _ in range(3))
            weights = T.alloc_fragment(config.tile, T.dtype(options.loaded_weight))
            weight_sums = T.alloc_fragment((pieces, block_rows, lanes, config.vec), "float32")
            partials = T.alloc_fragment((config.threads,), "float32")
            rstds, sums, means = (T.alloc_fragment((block_rows,), "float32") for _ in range(3))
            T.annotate_layout({each: layout_of_tile(config) for each in (xs, grads, others, weights)})
            T.annotate_layout({weight_sums: steps.layout_of_sums(config, pieces)})
            weight_at, factors = lambda i: (0, group, True), steps.Factors(rstds, weights, out_scale, weight_offset)
            T.clear(weight_sums)
            for step in T.serial(T.ceildiv(rows_of_group, blocks * block_rows)):
                row_at = steps.rows_of_step(ranges, step, group, options)
                for i in T.Parallel(block_rows):
                    batch, row, is_row = row_at(i)
                    rstds[i] = T.if_then_else(is_row, rstd[batch, row], T.float32(0))
                T.clear(partials)
                for piece in T.unroll(pieces):
                    steps.load_rows(x, xs, row_at, options, piece * width)
                    steps.load_rows(out_grad, grads, row_at, options, piece * width)
                    if options.has_weight:
                        steps.load_weights(weight, weights, weight_at, options, piece * width)
                    if options.has_residual and pieces == 1:
                        steps.load_rows(residual_out_grad, others, row_at, options, piece * width)
                    steps.add_products(xs, grads, factors, partials, options, config)
                steps.sums_of_rows(partials, sums, lanes)
                for i in T.Parallel(block_rows):
                    means[i] = sums[i] / T.float32(hidden)
                for piece in T.unroll(pieces):
                    if pieces > 1:
                        # From the caches: registers have no room for a row.
                        steps.load_rows(x, xs, row_at, options, piece * width)
                        steps.load_rows(out_grad, grads, row_at, options, piece * width)
                        if options.has_weight:
                            steps.load_weights(weight, weights, weight_at, options, piece * width)
                        if options.has_residual:
                            steps.load_rows(residual_out_grad, others, row_at, options, piece * width)
                    steps.gradients(xs, grads, others, factors, means, weight_sums, piece, options, config)
                    steps.store_rows(xs, x_grad, row_at, options, piece * width)
            if options.has_weight:
                steps.store_parts(weight_sums, weight_parts, group, part)

    return norm_backward


@kernel(pass_configs=DIRECT_COPIES)
def sum_parts_kernel(hidden: int, dtype: torch.dtype, accumulates: bool, arch: Arch) -> Any:
    """Sum the parts of weight_grad: each thread those of one channel in one of 32 segments, in float64."""
    import tilelang.language as T

    num_weights, num_parts = T.dynamic("num_weights"), T.dynamic("num_parts")
    tiles = ceil_div(hidden, WARP)

    @T.prim_func
    def sum_parts(
        weight_parts: T.Tensor((num_weights, num_parts, hidden), "float32"),
        weight_grad: T.Tensor((num_weights, hidden), T.dtype(dtype)),
    ) -> None:
        with T.Kernel(num_weights * tiles, threads=WARP * PART_SEGMENTS) as block:
            group, first = block // tiles, block % tiles * WARP
            sums = T.alloc_fragment((PART_SEGMENTS, WARP), "float64")
            shared = T.alloc_shared((PART_SEGMENTS, WARP), "float64")
            T.clear(sums)
            length = T.ceildiv(num_parts, PART_SEGMENTS)
            for k in T.unroll(length, unroll_factor=8):
                for segment, c in T.Parallel(PART_SEGMENTS, WARP):
                    part = segment * length + k
                    is_inside = part < num_parts and first + c < hidden
                    value = T.if_then_else(is_inside, weight_parts[group, part, first + c], T.float32(0))
                    sums[segment, c] = sums[segment, c] + T.cast(value, "float64")
            T.copy(sums, shared)
            for c in T.Parallel(WARP):
                if first + c < hidden:
                    total = T.alloc_var("float64", init=T.float64(0))
                    for segment in T.unroll(PART_SEGMENTS):
                        total = total + shared[segment, c]
                    if accumulates:
                        total = total + T.cast(weight_grad[group, first + c], "float64")
                    weight_grad[group, first + c] = T.cast(T.cast(total, "float32"), dtype)

    return sum_parts


@op(writes=("weight_grad",), aligned=("weight", "weight_grad"))
def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `norm_forward` with respect to x and weight.

    Every step in float32, rounded to nearest with ties to even, from left to right:

        x̂ = x * rstd;  g = out_grad * out_scale;  gw = g * (weight + weight_offset);  m = (Σ x̂ * gw) / H
        x_grad = (gw - x̂ * m) * rstd, + residual_out_grad if it is given, rounded to x's dtype
        weight_grad = Σ_t x̂ * g, + the given buffer, rounded to its dtype

    The sums are in an order fixed by the number of rows, H and the dtype, the last one over parts of the rows
    in float64: the bits are the same on every GPU. x_grad is the gradient of the residual, too, and a forward that
    rounded before the weight has the same gradients. Names and formulas are those of DeepSeek's TileKernels 2.1.0.

    Args:
        out_grad: Gradient of the forward's out, like x.
        x: The forward's norm_input, (..., T, H) bfloat16 or float32, as described there.
        weight: The forward's weight; None for none.
        rstd: The forward's rstd, float32 (..., T), contiguous.
        residual_out_grad: Gradient of the forward's norm_input, like x.
        out_scale: The forward's.
        weight_grad: bfloat16 or float32, weight's shape, contiguous, to which the gradient is added in place.
        weight_offset: The forward's.

    Returns:
        `(x_grad, weight_grad)`: x_grad like x, contiguous; weight_grad the given buffer, or a new tensor of weight's
        dtype, or None without weight. Without rows it is zero, or unchanged.

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    leading, hidden = check_x(x, 8)
    check_rows("out_grad", out_grad, tuple(x.shape), (x.dtype,), x.device)
    check_weight(weight, x)
    check_factors(out_scale, weight_offset)
    check.tensor("rstd", rstd, (torch.float32,), leading, device=x.device)
    if residual_out_grad is not None:
        check_rows("residual_out_grad", residual_out_grad, tuple(x.shape), (x.dtype,), x.device)
    x_grad, accumulates = new(x.new_empty, x.shape), weight_grad is not None
    if weight is None:
        check.require(weight_grad is None, "weight_grad", "None without weight", "a tensor")
    elif weight_grad is None:
        weight_grad = new(weight.new_empty, weight.shape)
    else:
        dtypes = (torch.bfloat16, torch.float32)
        check.tensor("weight_grad", weight_grad, dtypes, tuple(weight.shape), device=x.device)
    if launching(x_grad, weight_grad):
        arch, parts = get_arch(x.device), None
        options = NormOptions.of(x, weight, (out_grad, residual_out_grad, x_grad), residual_out_grad is not None)
        num_weights = leading[-1] if options.has_rows_of_weight else 1
        num_rows = x.numel() // (hidden * max(num_weights, 1))
        blocks = num_parts(num_rows, hidden, x.dtype)
        if weight is not None:
            parts = x.new_empty((num_weights, blocks, hidden), dtype=torch.float32)
        if x.numel():
            _norm_backward_kernel(hidden, options, arch)(
                *(folded(out_grad), folded(x), rows_of_weight(weight), rstd.view(-1, leading[-1])),
                *(folded(residual_out_grad), folded(x_grad), parts, blocks, float(out_scale), float(weight_offset)),
            )
        if x.numel() and weight_grad is not None:
            sum_parts = sum_parts_kernel(hidden, weight_grad.dtype, accumulates, arch)
            sum_parts(parts, rows_of_weight(weight_grad))
        elif weight_grad is not None and not accumulates:
            weight_grad.zero_()
    return x_grad, weight_grad
