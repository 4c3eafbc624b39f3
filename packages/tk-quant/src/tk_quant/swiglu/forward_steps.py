"""The steps of swiglu_forward_and_per_token_cast's kernel; forward_and_per_token_cast.py has the picture.

A piece is `vec` neighbouring channels of a row. A thread holds its pieces of both halves of x as uint32 words in `gate`
and `value` (pieces, words), and their SwiGLU as float32 in `values` (pieces, channels). Interleaved, `gate` has twice
the words, of gates and values, and `value` is the same buffer. The last arguments, from
`source` or `options` on, are constants at compile time. Kernels import this module in their builder, as it imports
TileLang.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch

from tk_core.headers import builtin
from tk_core.macros.quantize import encode_e2m1, encode_e4m3
from tk_core.scales import ScaleLayout
from tk_quant.cast.config import CastInput
from tk_quant.cast.format import BITS
from tk_quant.cast.words import element, load_words, store_words
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.swiglu.activation import (
    NEAR_ALPHA,
    NEAR_LIMIT,
    NEAR_LIMIT_OF_GELU,
    Scalars,
    activated,
    clamp_activation,
    clamp_gate,
    exponents,
    find_segment,
    is_gate_clamped,
    is_in_segment,
    near_logistic,
    near_sigmoid,
    near_silu,
    value_factor,
)
from tk_quant.swiglu.arguments import SwigluOptions


class RowMaps(NamedTuple):
    """Where a kernel finds which rows are padding, and the weights of the others; what a call lacks is a number."""

    pos_to_token_topk: T.Buffer
    topk_weights: T.Buffer
    pos_to_expert: T.Buffer
    expert_ends: T.Buffer
    routed_scaling_factor: T.float32


@T.macro
def look_up(
    maps: RowMaps,
    num_positions: Any,
    row: T.int32,
    inside: T.bool,
    real: T.Buffer,
    weight: T.Buffer,
    options: SwigluOptions,
) -> None:
    """Set real[0] to whether a row is not padding, and weight[0] to its weight."""
    real[0] = inside and row < num_positions
    if options.pairs:
        num_tokens, num_topk = maps.topk_weights.shape
        index = T.alloc_var("int32")
        index = T.reinterpret(T.ldg32(maps.pos_to_token_topk[row], pred=real[0]), "int32")
        real[0] = real[0] and index >= 0
        real[0] = real[0] and T.cast(index, "int64") < T.cast(num_tokens, "int64") * num_topk
    if options.experts:
        real[0] = real[0] and T.reinterpret(T.ldg32(maps.pos_to_expert[row], pred=real[0]), "int32") >= 0
    if options.has_segments:
        num_ended, end = find_segment(maps.expert_ends, row)
        real[0] = real[0] and is_in_segment(row, num_ended, end, options)
    if options.pairs:
        weight[0] = T.reinterpret(T.ldg32(maps.topk_weights[0, index], pred=real[0]), "float32")
    if options.by_position:
        weight[0] = T.reinterpret(T.ldg32(maps.topk_weights[row], pred=real[0]), "float32")
    if options.scaled:
        weight[0] = weight[0] * maps.routed_scaling_factor


@T.macro
def load_piece(
    x: T.Buffer,
    gate: T.Buffer,
    value: T.Buffer,
    piece: int,
    row: T.int32,
    col: T.int32,
    valid: T.bool,
    source: CastInput,
    options: SwigluOptions,
) -> None:
    """Load a piece of both halves of x; zeros where not `valid`."""
    load_words(x, gate, piece, row, col * 2 if options.interleaved else col, valid, source.alignment)
    if options.gated and not options.interleaved:
        load_words(x, value, piece, row, x.shape[1] // 2 + col, valid, source.alignment)


def _gate_of(gate: Any, piece: Any, index: Any, source: CastInput, options: SwigluOptions) -> Any:
    """float32 expression of a gate of a piece."""
    return element(gate, piece, 2 * index if options.interleaved else index, source.dtype is torch.bfloat16)


def _value_of(value: Any, piece: Any, index: Any, source: CastInput, options: SwigluOptions) -> Any:
    """float32 expression of a value of a piece."""
    return element(value, piece, 2 * index + 1 if options.interleaved else index, source.dtype is torch.bfloat16)


def _is_within(largest: Any, limits: Any, alpha: Any, options: SwigluOptions) -> Any:
    """Expression: whether gates are within `limits`, or with alpha their product is within ±87.

    `largest` and `limits` have two magnitudes of bfloat16, of gates, or of values in the upper half if interleaved.
    """
    if options.has_alpha:
        lower = T.reinterpret(largest << T.uint32(16), "float32") * alpha <= T.float32(87)
        upper = T.reinterpret(largest & T.uint32(0xFFFF0000), "float32") * alpha <= T.float32(87)
        of_gates = lower if options.interleaved else T.And(lower, upper)
        return T.And(of_gates, alpha <= T.float32(NEAR_ALPHA))
    return builtin("uint32", "__vmaxu2", largest, limits) == limits


@T.macro
def _is_near(gate: T.Buffer, piece: int, alpha: T.float32, options: SwigluOptions) -> T.bool:
    """Whether the exponents of all gates of a bfloat16 piece are within ±87, as divisions without a branch need.

    False with NaN.
    """
    largest = T.alloc_var("uint32", init=T.uint32(0))
    for j in T.unroll(gate.shape[1]):
        largest = larger_magnitude_bf16x2(largest, gate[piece, j])
    limit = NEAR_LIMIT_OF_GELU if options.activation == "gelu_tanh" else NEAR_LIMIT
    limits = T.uint32((0xFFFF if options.interleaved else limit) << 16 | limit)
    return _is_within(largest, limits, alpha, options)


@T.macro
def _activations_of_piece(
    gate: T.Buffer, values: T.Buffer, piece: int, scalars: Scalars, source: CastInput, options: SwigluOptions
) -> None:
    vec = values.shape[1]
    divides = source.dtype is torch.bfloat16 and options.activation != "relu2"
    if divides and _is_near(gate, piece, scalars.alpha, options):
        for j in T.unroll(vec):
            left = clamp_gate(_gate_of(gate, piece, j, source, options), scalars, options)
            if options.is_plain:
                # A clamped gate may be no bfloat16, which near_silu needs.
                values[piece, j] = near_sigmoid(left)[1] if options.clamp else near_silu(left)
            else:
                logistic = near_logistic(left, exponents(left, scalars, options)[0])
                values[piece, j] = clamp_activation(logistic[1], scalars, options)
    else:
        for j in T.unroll(vec):
            left = clamp_gate(_gate_of(gate, piece, j, source, options), scalars, options)
            values[piece, j] = activated(left, scalars, options)


@T.macro
def activate(
    gate: T.Buffer,
    value: T.Buffer,
    values: T.Buffer,
    piece: int,
    weight: T.float32,
    scalars: Scalars,
    source: CastInput,
    options: SwigluOptions,
) -> None:
    """Compute SwiGLU of a piece, times its row's weight, into values[piece]; zeros for padding."""
    vec = values.shape[1]
    _activations_of_piece(gate, values, piece, scalars, source, options)
    if options.gated:
        for j in T.unroll(vec):
            values[piece, j] = values[piece, j] * value_factor(
                _value_of(value, piece, j, source, options), scalars, options
            )
    if options.weights:
        for j in T.unroll(vec):
            values[piece, j] = values[piece, j] * weight


@T.macro
def count_clamped(
    gate: T.Buffer,
    value: T.Buffer,
    piece: int,
    vec: int,
    scalars: Scalars,
    total: T.Buffer,
    source: CastInput,
    options: SwigluOptions,
) -> None:
    """Count gates > clamp, values > clamp and values < -clamp of a piece; add them to the thread block's totals."""
    count = T.alloc_local((3,), "int32")
    T.clear(count)
    for j in T.unroll(vec):
        count[0] = count[0] + T.cast(
            is_gate_clamped(_gate_of(gate, piece, j, source, options), scalars, options), "int32"
        )
        if options.gated:
            count[1] = count[1] + T.cast(_value_of(value, piece, j, source, options) > scalars.clamp, "int32")
            count[2] = count[2] + T.cast(_value_of(value, piece, j, source, options) < -scalars.clamp, "int32")
    for i in T.unroll(3):
        if count[i] > 0:
            T.atomic_add(total[i], count[i])


@T.macro
def _is_beyond(
    gate: T.Buffer, value: T.Buffer, piece: int, clamp: T.float32, source: CastInput, options: SwigluOptions
) -> T.bool:
    """Whether a gate or value of a piece is above the clamp in magnitude, or NaN: else no clamp changes anything."""
    largest = T.alloc_var("uint32", init=T.uint32(0))
    is_bf16 = source.dtype is torch.bfloat16
    larger = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32
    for j in T.unroll(gate.shape[1]):
        largest = larger(largest, gate[piece, j])
    if options.gated and not options.interleaved:
        for j in T.unroll(value.shape[1]):
            largest = larger(largest, value[piece, j])
    if is_bf16:
        largest = T.max(largest & T.uint32(0xFFFF0000), largest << T.uint32(16))
    # Compared as bits, where NaN is above all.
    return largest > T.reinterpret(clamp, "uint32")


@T.macro
def activate_and_count(
    gate: T.Buffer,
    value: T.Buffer,
    values: T.Buffer,
    piece: int,
    weight: T.float32,
    scalars: Scalars,
    total: T.Buffer,
    source: CastInput,
    options: SwigluOptions,
    unclamped: SwigluOptions,
) -> None:
    """`activate`, and `count_clamped` if asked for; `unclamped` are the options without the clamp.

    Pieces that no clamp changes are most, and take neither its instructions nor those that count.
    """
    if options.clamp and _is_beyond(gate, value, piece, scalars.clamp, source, options):
        activate(gate, value, values, piece, weight, scalars, source, options)
        if options.count:
            count_clamped(gate, value, piece, int(values.shape[1]), scalars, total, source, options)
    else:
        activate(gate, value, values, piece, weight, scalars, source, unclamped)


@T.macro
def store_values(values: T.Buffer, out: T.Buffer, piece: int, row: T.int32, col: T.int32) -> None:
    """Store values[piece], 16 bytes of the output, rounded to its dtype."""
    rounded = T.alloc_local((values.shape[1],), out.dtype)
    for j in T.vectorized(values.shape[1]):
        rounded[j] = T.cast(values[piece, j], out.dtype)
    T.stg128(out[row, col], T.view(rounded, (4,), "uint32")[0:4])


@T.macro
def piece_amax(values: T.Buffer, piece: int, amax: T.Ref) -> None:
    """Raise amax, the bits of a float32 as int32, to max |values[piece]|; NaN has bits above those of infinity."""
    largest = T.alloc_var("uint32")
    largest = T.uint32(0)
    for j in T.unroll(values.shape[1]):
        largest = larger_magnitude_f32(largest, T.reinterpret(values[piece, j], "uint32"))
    amax = T.max(amax, T.reinterpret(largest, "int32"))


@T.macro
def store_piece(
    values: T.Buffer, data: T.Buffer, piece: int, row: T.int32, col: T.int32, factor: T.float32, valid: T.bool, fmt: str
) -> None:
    """Multiply values[piece] by a factor, encode the products, and store the codes."""
    vec = int(values.shape[1])
    out_words = vec * BITS[fmt] // 32
    scaled = T.alloc_local((vec,), "float32")
    codes = T.alloc_local((out_words,), "uint32")
    for j in T.unroll(vec):
        scaled[j] = values[piece, j] * factor
    if fmt == "e4m3":
        encode_e4m3(scaled, codes)
    else:
        # The factor is made from the group's amax, so magnitudes are bounded unless amax is not finite.
        encode_e2m1(scaled, codes, True)
    if valid:
        store_words(data, codes, row, col * BITS[fmt] // 8)


@T.macro
def store_sf(
    sf: T.Buffer,
    group_sf: T.float32,
    row: T.int32,
    col: T.int32,
    lane: T.int32,
    valid: T.bool,
    hidden: int,
    num_per_channels: int,
    group_lanes: int,
    layout: ScaleLayout,
) -> None:
    """Store the sf of a group, which is `group_lanes` neighbouring lanes; one-byte sf as words of four groups."""
    is_swizzled = layout is ScaleLayout.SWIZZLED
    if is_swizzled or layout is ScaleLayout.PACKED_UE8M0:
        word = T.alloc_var("uint32")
        word = T.if_then_else(valid, T.reinterpret(group_sf, "uint32") >> T.uint32(23), T.uint32(0))
        word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
        word = word | T.shfl_xor(word, group_lanes)
        word = word | T.shfl_xor(word, 2 * group_lanes)
        first = lane % (4 * group_lanes) == 0 and col < hidden
        if is_swizzled:
            # Padding rows, and the rows that fill up the last tile of 128, get zeros.
            if first and row < sf.shape[0] * 128:
                T.stg32(sf[row // 128, col // (4 * num_per_channels), row % 32, row % 128 // 32, 0], word)
        elif first and valid:
            sf[row, col // (4 * num_per_channels)] = T.reinterpret(word, "int32")
    elif valid and lane % group_lanes == 0:
        sf[row, col // num_per_channels] = group_sf
