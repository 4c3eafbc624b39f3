"""The steps of swiglu_backward_and_per_token_cast's kernel; backward_and_per_token_cast.py has the picture.

A piece is `vec` neighbouring channels of a row. A thread holds its piece of both halves of x as uint32 words of e4m3 in
`codes` (halves, words), with the sf of each half in `piece_sf`; its piece of grad_out as words in `grad` (1, words);
and as float32 in `values` (3, channels) out, and dl and dr, the halves of x_grad. Kernels import this module in their
builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_core.headers import builtin
from tk_core.macros.quantize import encode_e4m3, raised
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.cast.config import CastSf
from tk_quant.cast.scales import quick_sf_of_amax, sf_bytes, sf_index
from tk_quant.cast.words import element, load_words, store_words
from tk_quant.device.magnitude import larger_magnitude_f32
from tk_quant.swiglu.activation import (
    NEAR_ALPHA,
    NEAR_SF,
    NEAR_SF_OF_GELU,
    Scalars,
    activation_of,
    clamp_activation,
    clamp_gate,
    divisor_of,
    exponents,
    gate_gradient,
    near_logistic,
    near_sigmoid,
    slope_factor,
    times_value,
    value_factor,
    value_gradient,
)
from tk_quant.swiglu.arguments import SwigluOptions

# Channels that a thread computes at a time; more would take more registers.
_CHUNK = 4


@T.macro
def load_piece(
    x: T.Buffer,
    x_sf: T.Buffer,
    grad_out: T.Buffer,
    codes: T.Buffer,
    piece_sf: T.Buffer,
    grad: T.Buffer,
    row: T.int64,
    col: T.int32,
    valid: T.bool,
    alignments: tuple[int, int],
    options: SwigluOptions,
) -> None:
    """Load a piece of x and of grad_out, whose rows are aligned to `alignments` bytes; no reads where not `valid`.

    Interleaved, `codes` is the piece as it lies in memory.
    """
    hidden, width = int(grad_out.shape[1]), int(x.shape[1])
    num_per_channels = width // int(x_sf.shape[1])
    if options.interleaved:
        load_words(x, T.view(codes, (1, 2 * codes.shape[1]), "uint32"), 0, row, 2 * col, valid, alignments[0])
    else:
        for half in T.unroll(options.width):
            load_words(x, codes, half, row, half * hidden + col, valid, alignments[0])
    load_words(grad_out, grad, 0, row, col, valid, alignments[1])
    for half in T.unroll(options.width):
        piece_sf[half] = T.reinterpret(
            T.ldg32(
                x_sf[row, (2 * col if options.interleaved else half * hidden + col) // num_per_channels], pred=valid
            ),
            "float32",
        )


@T.macro
def take_piece(
    loaded: T.Buffer, loaded_sf: T.Buffer, codes: T.Buffer, piece_sf: T.Buffer, options: SwigluOptions
) -> None:
    """Copy a piece that `load_piece` has loaded, codes of gates to codes[0] and codes of values to codes[1]."""
    num_words = int(codes.shape[1])
    pairs = T.view(loaded, (2 * num_words,), "uint32")
    for half in T.unroll(options.width):
        piece_sf[half] = loaded_sf[half]
        for j in T.unroll(num_words):
            if options.interleaved:
                every_second = T.uint32(0x6420) + T.cast(half, "uint32") * T.uint32(0x1111)
                codes[half, j] = builtin("uint32", "__byte_perm", pairs[2 * j], pairs[2 * j + 1], every_second)
            else:
                codes[half, j] = loaded[half, j]


def _is_near(gate_sf: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """Expression: whether the exponents of all gates with a scale factor are within ±87; False for NaN."""
    if options.has_alpha:
        is_within = T.abs(gate_sf) * scalars.alpha <= T.float32(NEAR_SF)
        return T.And(is_within, scalars.alpha <= T.float32(NEAR_ALPHA))
    return T.abs(gate_sf) <= T.float32(NEAR_SF_OF_GELU if options.activation == "gelu_tanh" else NEAR_SF)


@T.macro
def differentiate(
    codes: T.Buffer,
    piece_sf: T.Buffer,
    grad: T.Buffer,
    weight: T.float32,
    scalars: Scalars,
    values: T.Buffer,
    row_sum: T.Ref,
    options: SwigluOptions,
) -> None:
    """Compute out, dl and dr of a piece into values; add the piece's part of the weight's gradient to row_sum.

    What gates without values lack, codes[1] and values[2], is left alone.
    """
    vec = int(values.shape[1])
    is_bf16 = int(grad.shape[1]) < vec
    x_values = T.alloc_local((2, _CHUNK), "float32")
    # Activations, and what gradients are multiplied by for their slopes: sigmoids, if there are any.
    sigmoids, silus = T.alloc_local((_CHUNK,), "float32"), T.alloc_local((_CHUNK,), "float32")
    left, right, scaled = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    elements = T.view(codes, (2, vec), "float8_e4m3fn")
    for chunk in T.unroll(vec // _CHUNK):
        first = chunk * _CHUNK
        for j in T.vectorized(_CHUNK):
            x_values[0, j] = T.cast(elements[0, first + j], "float32")
        for j in T.unroll(_CHUNK):
            x_values[0, j] = x_values[0, j] * piece_sf[0]
        if options.activation != "relu2" and _is_near(piece_sf[0], scalars, options):
            for j in T.unroll(_CHUNK):
                if options.is_plain:
                    sigmoids[j], silus[j] = near_sigmoid(clamp_gate(x_values[0, j], scalars, options))
                else:
                    left = clamp_gate(x_values[0, j], scalars, options)
                    sigmoids[j], silus[j] = near_logistic(left, exponents(left, scalars, options)[0])
        else:
            for j in T.unroll(_CHUNK):
                left = clamp_gate(x_values[0, j], scalars, options)
                sigmoids[j], silus[j] = (
                    slope_factor(left, divisor_of(left, scalars, options), options),
                    activation_of(left, divisor_of(left, scalars, options), options),
                )
        if options.gated:
            for j in T.vectorized(_CHUNK):
                x_values[1, j] = T.cast(elements[1, first + j], "float32")
        for j in T.unroll(_CHUNK):
            if options.gated:
                x_values[1, j] = x_values[1, j] * piece_sf[1]
            left, right = (
                clamp_gate(x_values[0, j], scalars, options),
                value_factor(x_values[1, j], scalars, options),
            )
            values[0, first + j] = times_value(clamp_activation(silus[j], scalars, options), right, options)
            row_sum = T.ieee_fmaf(element(grad, 0, first + j, is_bf16), values[0, first + j], row_sum)
            if options.weights:
                values[0, first + j] = values[0, first + j] * weight
                scaled = element(grad, 0, first + j, is_bf16) * weight * sigmoids[j]
            else:
                scaled = element(grad, 0, first + j, is_bf16) * sigmoids[j]
            values[1, first + j] = gate_gradient(
                times_value(scaled, right, options), left, sigmoids[j], scalars, options, T.ieee_fmaf
            )
            if options.gated:
                values[2, first + j] = value_gradient(
                    *(scaled, element(grad, 0, first + j, is_bf16), weight), left, silus[j], scalars, options
                )
            if options.clamp:
                values[1, first + j] = T.if_then_else(
                    (silus[j] if options.clamp_after else x_values[0, j]) > scalars.clamp,
                    *(T.float32(0), values[1, first + j]),
                )
                if options.gated:
                    values[2, first + j] = T.if_then_else(
                        T.abs(x_values[1, j]) > scalars.clamp, T.float32(0), values[2, first + j]
                    )


@T.macro
def store_bf16(out: T.Buffer, values: T.Buffer, which: int, row: T.int64, col: T.int32) -> None:
    """Round values[which] to bfloat16 and store it."""
    vec = int(values.shape[1])
    rounded = T.alloc_local((vec,), "bfloat16")
    for j in T.vectorized(vec):
        rounded[j] = T.cast(values[which, j], "bfloat16")
    words = T.view(rounded, (vec // 2,), "uint32")
    for j in T.unroll(vec // 8):
        T.stg128(out[row, col + 8 * j], words[4 * j : 4 * j + 4])


@T.macro
def clear_last_word(sf: T.Buffer, row: T.int32, num_groups: int, layout: ScaleLayout) -> None:
    """Store zeros after a row's last group of packed sf, up to the end of the word."""
    if layout is ScaleLayout.PACKED_UE8M0:
        for k in T.unroll(-num_groups % 4):
            sf_bytes(sf, layout)[sf_index(row, num_groups + k, layout)] = T.uint8(0)


@T.macro
def quantize(
    values: T.Buffer,
    data: T.Buffer,
    sf: T.Buffer,
    row: T.int64,
    col: T.int32,
    valid: T.bool,
    least_amax: T.float32,
    is_zero: Any,
    lanes: int,
    group_lanes: int,
    of_sf: CastSf,
) -> None:
    """Quantize dl and dr of a piece to e4m3; even lanes of a group reduce amax and make sf for dl, odd lanes for dr.

    `is_zero`: whether the row's sf are to be 0; None if no row's are.
    """
    hidden, vec = int(data.shape[1]) // 2, int(values.shape[1])
    num_per_channels, code_words = group_lanes * vec, vec // 4
    amax, factor = T.alloc_local((2,), "int32"), T.alloc_local((2,), "float32")
    scaled, codes = T.alloc_local((vec,), "float32"), T.alloc_local((code_words,), "uint32")
    largest, half_amax = T.alloc_var("uint32"), T.alloc_var("int32")
    thread = T.get_thread_binding()
    is_odd = thread % 2 == 1
    for half in T.unroll(2):
        largest = T.uint32(0)
        for j in T.unroll(vec):
            largest = larger_magnitude_f32(largest, T.reinterpret(values[1 + half, j], "uint32"))
        amax[half] = T.reinterpret(largest, "int32")
    half_amax = raised(T.if_then_else(is_odd, amax[1], amax[0]), least_amax)
    half_amax = T.max(half_amax, T.shfl_xor(T.if_then_else(is_odd, amax[0], amax[1]), 1))
    for j in T.unroll(1, group_lanes.bit_length() - 1):
        half_amax = T.max(half_amax, T.shfl_xor(half_amax, 1 << j))
    half_sf, half_factor = quick_sf_of_amax(half_amax, "e4m3", of_sf.round_sf)
    if valid and thread % lanes % group_lanes < 2:
        if is_zero is not None:
            half_sf = T.if_then_else(is_zero, T.float32(0), half_sf)
        if of_sf.layout is ScaleLayout.PACKED_UE8M0:
            block = (thread % 2 * hidden + col) // num_per_channels
            exponent = T.cast(T.reinterpret(half_sf, "uint32") >> T.uint32(23), "uint8")
            sf_bytes(sf, of_sf.layout)[sf_index(row, block, of_sf.layout)] = exponent
        else:
            sf[row, (thread % 2 * hidden + col) // num_per_channels] = half_sf
    factor[0] = T.shfl_xor(half_factor, 1)
    factor[1] = T.if_then_else(is_odd, half_factor, factor[0])
    factor[0] = T.if_then_else(is_odd, factor[0], half_factor)
    for half in T.unroll(2):
        for j in T.unroll(vec):
            scaled[j] = values[1 + half, j] * factor[half]
        encode_e4m3(scaled, codes)
        if valid:
            store_words(data, codes, row, half * hidden + col)


@T.macro
def join_gradients(values: T.Buffer, joined: T.Buffer) -> None:
    """Put dl and dr of a piece beside each other, as they lie in x_grad if interleaved."""
    for j in T.unroll(values.shape[1]):
        joined[0, 2 * j] = values[1, j]
        joined[0, 2 * j + 1] = values[2, j]


@T.macro
def quantize_joined(
    gradients: T.Buffer,
    which: int,
    data: T.Buffer,
    sf: T.Buffer,
    row: T.int64,
    col: T.int32,
    valid: T.bool,
    least_amax: T.float32,
    is_zero: Any,
    lanes: int,
    group_lanes: int,
    of_sf: CastSf,
) -> None:
    """Quantize gradients[which], neighbours in x_grad, to e4m3; like `quantize`, but with one sf for all of them."""
    vec = int(gradients.shape[1])
    scaled, codes = T.alloc_local((vec,), "float32"), T.alloc_local((vec // 4,), "uint32")
    largest, amax = T.alloc_var("uint32"), T.alloc_var("int32")
    largest = T.uint32(0)
    for j in T.unroll(vec):
        largest = larger_magnitude_f32(largest, T.reinterpret(gradients[which, j], "uint32"))
    amax = raised(T.reinterpret(largest, "int32"), least_amax)
    for j in T.unroll(group_lanes.bit_length() - 1):
        amax = T.max(amax, T.shfl_xor(amax, 1 << j))
    group_sf, factor = quick_sf_of_amax(amax, "e4m3", of_sf.round_sf)
    if valid and T.get_thread_binding() % lanes % group_lanes == 0:
        if is_zero is not None:
            group_sf = T.if_then_else(is_zero, T.float32(0), group_sf)
        block = col // (group_lanes * vec)
        if of_sf.layout is ScaleLayout.PACKED_UE8M0:
            exponent = T.cast(T.reinterpret(group_sf, "uint32") >> T.uint32(23), "uint8")
            sf_bytes(sf, of_sf.layout)[sf_index(row, block, of_sf.layout)] = exponent
        else:
            sf[row, block] = group_sf
    for j in T.unroll(vec):
        scaled[j] = gradients[which, j] * factor
    encode_e4m3(scaled, codes)
    if valid:
        store_words(data, codes, row, col)


@T.macro
def store_row_sums(
    row_sums: T.Buffer,
    targets: T.Buffer,
    weight_grad: T.Buffer,
    row_sum: T.Ref,
    thread: Any,
    tile_rows: Any,
    threads: int,
    rows: int,
    lanes: int,
    factor: T.float32,
    options: SwigluOptions,
) -> None:
    """Sum row_sums over the lanes of each row, one warp a row, and store the sum at targets[row] in weight_grad."""
    num_warps = threads // 32
    for turn in T.unroll(ceil_div(int(targets.shape[0]), num_warps)):
        summed = thread // 32 + turn * num_warps
        if summed < tile_rows:
            row_sum = T.float32(0)
            for k in T.unroll(ceil_div(lanes, 32)):
                if k * 32 + thread % 32 < lanes:
                    first = summed // rows * threads + summed % rows * lanes
                    row_sum = row_sum + row_sums[first + k * 32 + thread % 32]
            for j in T.unroll(5):
                row_sum = row_sum + T.shfl_xor(row_sum, 1 << j)
            if options.scaled:
                row_sum = row_sum * factor
            if thread % 32 == 0 and targets[summed] >= 0:
                if options.by_position:
                    weight_grad[targets[summed]] = row_sum
                else:
                    weight_grad[0, targets[summed]] = row_sum
