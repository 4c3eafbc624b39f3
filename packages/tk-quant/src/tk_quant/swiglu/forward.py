"""swiglu_forward: SwiGLU of each row, times its weight where there are weights, in bfloat16 or float32.

A thread block takes some rows and a range of their channels. A thread takes eight neighbouring channels of both halves
of one row or two:

    x, left     [ thread 0 | thread 1 | … ]      each field 8 channels, one 16-byte load of bfloat16
    x, right    [ thread 0 | thread 1 | … ]
    out         [ thread 0 | thread 1 | … ]

Interleaved, a gate and its value are one element of x, an integer of twice the bits. Rows of padding are not read, and
with psum_num_tokens_per_expert not written.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_quant.swiglu.arguments import (
    Rows,
    SwigluOptions,
    check_clamp_value,
    check_clamped_count,
    check_gating,
    check_swiglu_arguments,
)
from tk_quant.swiglu.tile_kernels import forward_called_as_in_2_1, may_be_called


def _tile(hidden: int, counts: bool) -> tuple[int, int, int]:
    """(rows, channels, threads) of a thread block's tile; channels past hidden are skipped.

    Narrow rows: thread blocks of at least 128 threads. Wide rows: up to 1024 channels, two rows a thread.
    H200, 34816 rows in bfloat16. Hidden 2048: 104.5 µs, with one row a thread 115.6. Hidden 256: 15.0 µs in thread
    blocks of four rows, 23.2 in thread blocks of one.
    """
    if counts:
        # T.reduce_sum needs a power of two of threads, and the three counts of a row share an int32, ten bits each.
        block_channels = min((512, 256, 128, 64), key=lambda channels: align(hidden, channels))
        return 1024 // block_channels, block_channels, 128
    if hidden >= 1024:
        block_channels = channel_tile(hidden, max_threads=128)
        return 2, block_channels, block_channels // VECTOR
    row_threads = hidden // VECTOR
    rows = next(rows for rows in (2, 4, 8, 16) if rows * row_threads >= 128 and rows * row_threads % 32 == 0)
    return rows, hidden, rows * row_threads


@kernel(pass_configs=DIRECT_COPIES)
def _swiglu_forward_kernel(
    hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, options: SwigluOptions, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_quant.swiglu import activation as of
    from tk_quant.swiglu.activation import find_segments, pair_of_row

    block_rows, block_channels, threads = _tile(hidden, options.count)
    num_positions, num_pairs = T.dynamic("num_positions"), T.dynamic("num_pairs")
    num_tiles, parts = ceil_div(hidden, block_channels), 2 if options.gated and not options.interleaved else 1
    x_type = of.element_type(dtype, options)
    zero = T.cast(0, x_type)

    @T.prim_func
    def swiglu_forward(
        x: T.Tensor((num_positions, parts, hidden), x_type),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        topk_weights: T.Tensor((num_pairs,), "float32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        limit: T.float32,
        out: T.Tensor((num_positions, hidden), out_dtype),
        clamped_count: T.Tensor((options.count or 3,), "int64"),
        expert_ends: T.Tensor((options.segments[0],), "int32") if options.has_segments else 0,
        routed_scaling_factor: T.float32 if options.scaled else 1.0,
        alpha: T.float32 if options.has_alpha else 1.0,
    ) -> None:
        with T.Kernel(T.ceildiv(num_positions, block_rows) * num_tiles, threads=threads) as block:
            first, channel = block // num_tiles * block_rows, block % num_tiles * block_channels
            pairs = T.alloc_fragment((block_rows,), "int32")
            weights = T.alloc_fragment((block_rows,), "float32")
            gates = T.alloc_fragment((block_rows, block_channels), x_type)
            values = T.alloc_fragment((block_rows, block_channels), x_type) if parts == 2 else gates
            activated = T.alloc_fragment((block_rows, block_channels), "float32")
            beyond = T.alloc_fragment((block_rows, block_channels), "int32")
            counted = T.alloc_fragment((block_rows,), "int32")
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
                    weights[r] = weights[r] * routed_scaling_factor
            for r, i in T.Parallel(block_rows, block_channels):
                is_read = pairs[r] >= 0 and channel + i < hidden
                gates[r, i] = T.if_then_else(is_read, x[first + r, 0, channel + i], zero)
            if parts == 2:
                for r, i in T.Parallel(block_rows, block_channels):
                    is_read = pairs[r] >= 0 and channel + i < hidden
                    values[r, i] = T.if_then_else(is_read, x[first + r, 1, channel + i], zero)
            for r, i in T.Parallel(block_rows, block_channels):
                gate = of.clamp_gate(of.gate_of(gates[r, i], options), scalars, options)
                value = of.value_factor(of.value_of(values[r, i], options), scalars, options)
                a = of.times_value(of.activated(gate, scalars, options), value, options)
                activated[r, i] = a * weights[r] if options.weights else a
            if options.has_segments:
                for r, i in T.Parallel(block_rows, block_channels):
                    if pairs[r] >= 0 and channel + i < hidden:
                        out[first + r, channel + i] = T.cast(activated[r, i], out_dtype)
            else:
                T.copy(activated, out[first : first + block_rows, channel : channel + block_channels])
            if options.count:
                for r, i in T.Parallel(block_rows, block_channels):
                    gate, value = of.gate_of(gates[r, i], options), of.value_of(values[r, i], options)
                    of_values = T.if_then_else(value > limit, 1 << 10, T.if_then_else(value < -limit, 1 << 20, 0))
                    beyond[r, i] = T.if_then_else(of.is_gate_clamped(gate, scalars, options), 1, 0) + (
                        of_values if options.gated else 0
                    )
                T.reduce_sum(beyond, counted, dim=1)
                for k in T.serial(3):
                    for r in T.Parallel(block_rows):
                        count = (counted[r] >> (10 * k)) & 1023
                        if count > 0:
                            T.atomic_add(clamped_count[k], T.cast(count, "int64"))
                if options.count == 4:
                    for r in T.Parallel(block_rows):
                        if pairs[r] >= 0 and channel == 0:
                            T.atomic_add(clamped_count[3], T.int64(hidden))

    return swiglu_forward


@may_be_called(forward_called_as_in_2_1)
@op(writes=("clamped_count",), aligned=("x",))
def swiglu_forward(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    clamped_count: Tensor | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> Tensor:
    """SwiGLU of each row, times its weight where there are weights, rounded once to bfloat16 or float32.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right: out = l / (1 + exp(-l)) * r * weight. With another activation

        silu with alpha    out = l / (1 + exp(-(alpha * l))) * r * weight
        swiglu_oai         out = l / (1 + exp(-(alpha * l))) * (r + 1) * weight
        gelu_tanh          out = l / (1 + exp(-(c * (k1 + k2 * (c * c))))) * r * weight, c = l cut to [-16, 16]
        relu2              out = q * q * r * weight, q = max(l, 0)

    where k1 = 2 * sqrt(2 / pi) and k2 = 0.044715 * k1 are the float32 with bits 0x3FCC422A and 0x3D922279: tanh's form
    of GELU. Without r there is no factor of it. Every bit equals the reference's. The positional arguments of
    TileKernels 2.1.0 are taken too: (x, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
    clamp_value, clamped_count).

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, contiguous, the gate l in the left half; hidden a multiple
            of 64.
        swiglu_clamp_value: c, 2**-126 to infinity: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        fmt: "bf16" or "fp32", the output's type.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32, contiguous: (num_tokens, num_topk) beside pos_to_token_topk, else (num_positions,).
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Rows of padding come out as zeros,
            whatever x holds there.
        clamped_count: int64 (3,) or (4,), to which the numbers of l > c, r > c and r < -c in rows that are not padding
            are added in place, and to the fourth the number of elements of these rows of the output. Needs
            a clamp value. With clamp_after it is silu(l) > c.
        psum_num_tokens_per_expert: int32 (num_experts,), the position where each expert's rows end. They begin where
            those of the expert before end, rounded up to a multiple of token_alignment. All other rows are padding, and
            rows of padding are then left unwritten.
        token_alignment: 1 to 65536.
        routed_scaling_factor: weights are multiplied by it first, rounded to float32.
        clamp_value: The same as swiglu_clamp_value.
        activation: "silu", "swiglu_oai" (gpt-oss), "gelu_tanh" or "relu2".
        alpha: of silu and swiglu_oai only, at least 2**-126; 1.702 for swiglu_oai if None.
        interleaved: l in the even channels of x, r in the odd ones.
        gated: False for x (num_positions, hidden), which has l alone; not for swiglu_oai.
        clamp_after: silu(l) is clamped instead of l, to at most c; of silu only. Without a clamp it changes nothing.

    Returns:
        (num_positions, hidden).

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    rows = Rows(*maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    gating = check_gating(activation, alpha, interleaved, gated, clamp_after)
    dtype, clamp = check_swiglu_arguments(x, fmt, rows, gating), check_clamp_value(swiglu_clamp_value, clamp_value)
    check_clamped_count(x, clamped_count, clamp)
    num_positions, hidden = x.shape[0], x.shape[1] // gating.width
    out = new(x.new_empty, (num_positions, hidden), dtype=dtype)
    if launching(out):
        limit = math.inf if clamp is None else float(clamp)
        weights = None if topk_weights is None else topk_weights.view(-1)
        options = rows.options(gating, clamp, clamped_count)
        _swiglu_forward_kernel(hidden, x.dtype, dtype, options, get_arch(x.device))(
            *(gating.parts(x), pos_to_token_topk, weights, pos_to_expert),
            *(limit, out, clamped_count, *rows.last_operands, *gating.last_operands),
        )
    return out
