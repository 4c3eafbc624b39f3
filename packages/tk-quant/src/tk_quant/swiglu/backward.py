"""swiglu_backward: gradients of `swiglu_forward` with respect to x and the weights; recomputes the forward.

A thread block takes some rows, fewer if they are wide, and loops over their channels in tiles. In a tile a thread takes
eight neighbouring channels of both halves of one row. The products for the weight's gradient are summed in registers
over the tiles, for each of the thread's channels; the sums of a row are added up after the last tile:

    tile                       0                            1                            …
    x, x_grad   left, right    [ thread 0 | thread 1 | … ]  [ thread 0 | thread 1 | … ]
    grad_out, out              [ thread 0 | thread 1 | … ]  [ thread 0 | thread 1 | … ]

Interleaved, a gate and its value are one element of x and x_grad, an integer of twice the bits.

The thread blocks also divide the pairs (token, top-k) among themselves, and write a gradient of 0 for pairs without a
position. Rows of padding are not read. The order of the sums depends only on hidden, the dtypes and `interleaved`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_quant.cast.format import PLAIN_DTYPES
from tk_quant.swiglu.arguments import (
    Rows,
    SwigluOptions,
    check_clamp_value,
    check_gating,
    check_maps_agree,
    check_swiglu_arguments,
)
from tk_quant.swiglu.tile_kernels import backward_called_as_in_2_1, may_be_called

_THREADS = 512 // VECTOR


def _tile(hidden: int) -> tuple[int, int]:
    """(rows, channels) of a thread block's tile, 512 elements in 64 threads, as wide as possible.

    The channels are a power of two, for T.reduce_sum, that divides hidden. They decide the order of the sums, so they
    must not depend on the number of positions.
    H200, 34816 rows in bfloat16, hidden 2048: 189 µs in thread blocks of 64 threads, 201 of 128, 213 of 256.
    """
    block_channels = min((512, 256, 128, 64), key=lambda channels: align(hidden, channels))
    return 512 // block_channels, block_channels


@kernel(pass_configs=DIRECT_COPIES)
def _swiglu_backward_kernel(
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    options: SwigluOptions,
    has_weight_grad: bool,
    with_out: bool,
    arch: Arch,
) -> Any:
    """`dtypes`: of x, grad_out and x_grad. The kernel's `steps`: pairs that a thread checks for lack of a position."""
    import tilelang.language as T

    from tk_quant.swiglu import activation as of
    from tk_quant.swiglu.activation import find_segments, pair_of_row

    block_rows, block_channels = _tile(hidden)
    parts = 2 if options.gated and not options.interleaved else 1
    x_type, grad_type = (of.element_type(dtype, options) for dtype in (dtypes[0], dtypes[2]))
    num_positions, num_pairs = T.dynamic("num_positions"), T.dynamic("num_pairs")
    tile_shape = (block_rows, block_channels)

    @T.prim_func
    def swiglu_backward(
        x: T.Tensor((num_positions, parts, hidden), x_type),
        grad_out: T.Tensor((num_positions, hidden), dtypes[1]),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        topk_weights: T.Tensor((num_pairs,), "float32"),
        token_topk_to_pos: T.Tensor((num_pairs,), "int32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        limit: T.float32,
        steps: T.int32,
        x_grad: T.Tensor((num_positions, parts, hidden), grad_type),
        weight_grad: T.Tensor((num_pairs,), "float32"),
        out: T.Tensor((num_positions, hidden), dtypes[2]),
        expert_ends: T.Tensor((options.segments[0],), "int32") if options.has_segments else 0,
        routed_scaling_factor: T.float32 if options.scaled else 1.0,
        alpha: T.float32 if options.has_alpha else 1.0,
    ) -> None:
        with T.Kernel(T.ceildiv(num_positions, block_rows), threads=_THREADS) as block:
            first = block * block_rows
            pairs = T.alloc_fragment((block_rows,), "int32")
            weights = T.alloc_fragment((block_rows,), "float32")
            gates = T.alloc_fragment(tile_shape, x_type)
            values = T.alloc_fragment(tile_shape, x_type) if parts == 2 else gates
            grads = T.alloc_fragment(tile_shape, dtypes[1])
            gate_grads = T.alloc_fragment(tile_shape, "float32")
            value_grads = T.alloc_fragment(tile_shape, "float32")
            if options.interleaved:
                pair_grads = T.alloc_fragment(tile_shape, grad_type)
            activated = T.alloc_fragment(tile_shape, "float32")
            products = T.alloc_fragment(tile_shape, "float32")
            sums = T.alloc_fragment((block_rows,), "float32")
            maps = num_positions, pos_to_token_topk, pos_to_expert, num_pairs, options
            scalars = of.Scalars(limit, alpha)
            if options.has_segments:
                num_ended = T.alloc_fragment((block_rows,), "int32")
                ends = T.alloc_fragment((block_rows,), "int32")
                find_segments(expert_ends, first, num_ended, ends)
            for r in T.Parallel(block_rows):
                pairs[r] = pair_of_row(first + r, *maps, (num_ended[r], ends[r]) if options.has_segments else None)
                if options.weights:
                    weights[r] = T.if_then_else(pairs[r] >= 0, topk_weights[pairs[r]], T.float32(0))
                if options.scaled:
                    # Not so in padding, where 0 times a negative factor would leave gradients of -0.
                    weights[r] = T.if_then_else(pairs[r] >= 0, weights[r] * routed_scaling_factor, T.float32(0))
            if has_weight_grad:
                T.clear(products)
            for tile in T.serial(hidden // block_channels):
                channel = tile * block_channels
                for r, i in T.Parallel(*tile_shape):
                    gates[r, i] = T.if_then_else(pairs[r] >= 0, x[first + r, 0, channel + i], T.cast(0, x_type))
                if parts == 2:
                    for r, i in T.Parallel(*tile_shape):
                        values[r, i] = T.if_then_else(pairs[r] >= 0, x[first + r, 1, channel + i], T.cast(0, x_type))
                for r, i in T.Parallel(*tile_shape):
                    grads[r, i] = T.if_then_else(pairs[r] >= 0, grad_out[first + r, channel + i], T.cast(0, dtypes[1]))
                for r, i in T.Parallel(*tile_shape):
                    g = T.cast(grads[r, i], "float32")
                    gate = of.clamp_gate(of.gate_of(gates[r, i], options), scalars, options)
                    value = of.value_factor(of.value_of(values[r, i], options), scalars, options)
                    d = of.divisor_of(gate, scalars, options)
                    s = of.slope_factor(gate, d, options)
                    a = of.times_value(
                        of.clamp_activation(of.activation_of(gate, d, options), scalars, options), value, options
                    )
                    gs = g * weights[r] * s if options.weights else g * s
                    activated[r, i] = a * weights[r] if options.weights else a
                    gate_grads[r, i] = of.gate_gradient(of.times_value(gs, value, options), gate, s, scalars, options)
                    value_grads[r, i] = of.value_gradient(
                        *(gs, g, weights[r], gate, of.activation_of(gate, d, options), scalars, options)
                    )
                    if has_weight_grad:
                        products[r, i] = products[r, i] + g * a
                if options.clamp:
                    for r, i in T.Parallel(*tile_shape):
                        if of.is_gate_clamped(of.gate_of(gates[r, i], options), scalars, options):
                            gate_grads[r, i] = T.float32(0)
                        if T.abs(of.value_of(values[r, i], options)) > limit:
                            value_grads[r, i] = T.float32(0)
                if options.interleaved:
                    for r, i in T.Parallel(*tile_shape):
                        pair_grads[r, i] = of.pair_of(gate_grads[r, i], value_grads[r, i], grad_type)
                    T.copy(pair_grads, x_grad[first : first + block_rows, 0, channel : channel + block_channels])
                else:
                    T.copy(gate_grads, x_grad[first : first + block_rows, 0, channel : channel + block_channels])
                if parts == 2:
                    T.copy(value_grads, x_grad[first : first + block_rows, 1, channel : channel + block_channels])
                if with_out:
                    T.copy(activated, out[first : first + block_rows, channel : channel + block_channels])
            if has_weight_grad:
                T.reduce_sum(products, sums, dim=1)
                if options.scaled:
                    for r in T.Parallel(block_rows):
                        sums[r] = sums[r] * routed_scaling_factor
                if options.by_position:
                    for r in T.Parallel(block_rows):
                        if first + r < num_positions:
                            weight_grad[first + r] = sums[r]
            if has_weight_grad and options.pairs:
                for r in T.Parallel(block_rows):
                    pair = T.if_then_else(first + r < num_positions, pos_to_token_topk[first + r], -1)
                    if pair >= 0 and pair < num_pairs:
                        weight_grad[pair] = sums[r]
                for step in T.serial(steps):
                    for i in T.Parallel(_THREADS):
                        num_blocks = T.ceildiv(num_positions, block_rows)
                        other = (T.cast(step, "int64") * num_blocks + block) * _THREADS + i
                        if other < num_pairs:
                            pos = token_topk_to_pos[other]
                            if pos < 0 or pos >= num_positions:
                                weight_grad[other] = T.float32(0)

    return swiglu_backward


@may_be_called(backward_called_as_in_2_1)
@op(aligned=("x", "grad_out"))
def swiglu_backward(
    x: Tensor,
    grad_out: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    with_out: bool = False,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Gradients of `swiglu_forward` with respect to x and the weights, and on request its output.

    With l and r the left and right half of a row of x, g = grad_out, and w the row's weight (1 without weights); every
    operation in float32 to nearest with ties to even, products from left to right, fma rounded once:

        d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
        out = a * w;  x_grad = [gs * r * fma(l, 1 - s, 1) | gs * l];  weight_grad = sum of g * a over the row

    For other activations d, a and the gradients of l and r are, with `swiglu_forward`'s c, k1 and k2,

        silu with alpha   d = 1 + exp(-(alpha * l)), and fma(alpha * l, 1 - s, 1)
        swiglu_oai        the same, with r + 1 for r
        gelu_tanh         d = 1 + exp(-(c * (k1 + k2 * (c * c)))), and fma(c * (k1 + 3 * k2 * (c * c)), 1 - s, 1)
        relu2             q = max(l, 0);  a = q * q * r;  g * w * (2 * q) * r and g * w * (q * q)

    where 3 * k2 is rounded.

    All results are exact but weight_grad, which is summed in float32, in an order that depends only on hidden, the
    dtypes and interleaved. The positional arguments of TileKernels 2.1.0 are taken too, and then its results are
    returned, a tuple of x_grad, weight_grad with weights, and out with do_recompute: (x, act_x_grad, fmt,
    psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, do_recompute).

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, contiguous, the gate l in the left half; hidden a multiple
            of 64.
        grad_out: (num_positions, hidden) bfloat16 or float32, contiguous.
        swiglu_clamp_value: c, 2**-126 to infinity: first l is clamped to at most c, and r to [-c, c]; x_grad is 0 at
            clamped elements. NaN stays NaN.
        fmt: "bf16" or "fp32", the type of x_grad and out.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32, contiguous: (num_tokens, num_topk) beside pos_to_token_topk, else (num_positions,).
        token_topk_to_pos: int32 (num_tokens, num_topk), contiguous, with topk_weights of that shape only; asks for
            their gradient. It is the position of each pair; a pair whose position is not a row of x has none. For all
            other pairs pos_to_token_topk has to name the pair at that position, else the pair's gradient is unspecified
            (`TK_DEBUG=1` raises ValueError).
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Rows of padding come out as zeros,
            whatever x and grad_out hold there.
        with_out: Also return the forward's output.
        psum_num_tokens_per_expert: int32 (num_experts,), the position where each expert's rows end. They begin where
            those of the expert before end, rounded up to a multiple of token_alignment. All other rows are padding.
        token_alignment: 1 to 65536.
        routed_scaling_factor: weights are multiplied by it first, rounded to float32, and weight_grad at the end.
        clamp_value: The same as swiglu_clamp_value.
        do_recompute: The same as with_out.
        activation, alpha, interleaved, gated, clamp_after: those of `swiglu_forward`. x_grad has l and r where x has
            them. With clamp_after the gradient of l is 0 where silu(l) > c, and that of r is g * w * c there.

    Returns:
        out: (num_positions, hidden), or None without `with_out`.
        x_grad: shaped like x.
        weight_grad: float32 (num_tokens, num_topk), 0 for a pair without a position, or None without token_topk_to_pos;
            for weights by position always, (num_positions,), 0 for padding.

    Raises:
        TypeError: An argument is not a tensor, number or flag as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    rows = Rows(*maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    gating = check_gating(activation, alpha, interleaved, gated, clamp_after)
    dtype, clamp = check_swiglu_arguments(x, fmt, rows, gating), check_clamp_value(swiglu_clamp_value, clamp_value)
    num_positions, hidden = x.shape[0], x.shape[1] // gating.width
    check.tensor("grad_out", grad_out, PLAIN_DTYPES, (num_positions, hidden), device=x.device)
    check.flag("with_out", with_out)
    check.flag("do_recompute", do_recompute)
    with_out = with_out or do_recompute
    if token_topk_to_pos is not None:
        if topk_weights is None or rows.by_position:
            got = None if topk_weights is None else tuple(topk_weights.shape)
            check.require(False, "topk_weights", "a tensor beside token_topk_to_pos, of two dimensions", got)
        pairs = tuple(topk_weights.shape)
        check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), pairs, device=x.device)
        if check.reads_data(x):
            check_maps_agree(pos_to_token_topk, token_topk_to_pos)
    has_weight_grad = rows.by_position or token_topk_to_pos is not None
    out = new(x.new_empty, (num_positions, hidden), dtype=dtype) if with_out else None
    x_grad = new(x.new_empty, x.shape, dtype=dtype)
    weight_grad = new(torch.empty_like, topk_weights) if has_weight_grad else None
    if launching(out, x_grad, weight_grad) and num_positions:
        arch, dtypes = get_arch(x.device), (x.dtype, grad_out.dtype, dtype)
        backward = _swiglu_backward_kernel(hidden, dtypes, rows.options(gating, clamp), has_weight_grad, with_out, arch)
        of_pairs = (None if each is None else each.view(-1) for each in (topk_weights, token_topk_to_pos, weight_grad))
        weights, positions, written = of_pairs
        num_pairs = 0 if written is None else written.shape[0]
        backward(
            *(gating.parts(x), grad_out, pos_to_token_topk, weights, positions, pos_to_expert),
            math.inf if clamp is None else float(clamp),
            ceil_div(num_pairs, ceil_div(num_positions, _tile(hidden)[0]) * _THREADS),
            *(gating.parts(x_grad), written, out, *rows.last_operands, *gating.last_operands),
        )
    elif launching(weight_grad):
        weight_grad.zero_()
    return out, x_grad, weight_grad
