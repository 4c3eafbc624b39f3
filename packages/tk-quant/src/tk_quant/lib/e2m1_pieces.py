"""Pieces of the casts to e2m1 by groups: some neighbouring channels of a row, which a thread takes at once.

They are uint32 words of x as it is, and of a pair also float32 values. Kernels import this module in their builder, as
it imports TileLang.
"""

from typing import Any

import tilelang.language as T
import torch

from tk_core.scales import ScaleLayout
from tk_quant.device.fp4 import decode_e2m1x4
from tk_quant.device.fp8 import decode_ue8m0
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.scaled_fp4 import (
    e2m1_by_sf,
    e2m1_scale_of_amax,
    e2m1x8_by_float,
    e2m1x8_by_power,
    nvfp4_scale_of_amax,
)
from tk_quant.lib.cast_formats import FORMATS, CastInput, CastScales
from tk_quant.lib.quantize import LIMITS, element, encode_macro, float_bits, scale_macro, tensor_scaled_macro


@T.macro
def load_factors(
    x_sf: T.Buffer, factors: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool, source: CastInput
) -> None:
    """The scale factors of the piece at (row, col) of a pair: one, or one for each element."""
    in_bytes = source.layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)
    word = T.alloc_var("uint32")
    for j in T.unroll(factors.shape[1]):
        sf_row, sf_col = row // source.block_size[0], (col + j) // source.block_size[1]
        if source.layout is ScaleLayout.SWIZZLED:
            word = T.ldg32(x_sf[sf_row // 128, sf_col // 4, sf_row % 32, sf_row % 128 // 32, 0], pred=valid)
        else:
            word = T.ldg32(x_sf[sf_row, sf_col // 4 if in_bytes else sf_col], pred=valid)
        if in_bytes:
            factors[piece, j] = decode_ue8m0(word, sf_col % 4)
        else:
            factors[piece, j] = T.reinterpret(word, "float32")


@T.macro
def dequantize_piece(
    words: T.Buffer, factors: T.Buffer, values: T.Buffer, piece: int, valid: T.bool, source: CastInput
) -> None:
    """values[piece] of a pair; zeros where it is not valid, as its words are unspecified there."""
    vec = values.shape[1]
    if FORMATS[source.dtype] == "e4m3":
        codes = T.view(words, values.shape, "float8_e4m3fn")
        for j in T.vectorized(vec):
            values[piece, j] = T.cast(codes[piece, j], "float32")
    else:
        for j in T.unroll(vec // 4):
            half = words[piece, j // 2] >> T.uint32(j % 2 * 16)
            decode_e2m1x4(half, T.address_of(values[piece, 4 * j]))
    for j in T.unroll(vec):
        value = values[piece, j] * factors[piece, j % factors.shape[1]]
        values[piece, j] = T.if_then_else(valid, value, T.float32(0))


@T.macro
def take_amax(words: T.Buffer, values: T.Buffer, piece: int, part: T.Ref, source: CastInput) -> None:
    """The larger of part and every |x| of a piece; of bfloat16, both halves for themselves."""
    for j in T.unroll(values.shape[1] if source.is_pair else words.shape[1]):
        bits = T.reinterpret(values[piece, j], "uint32") if source.is_pair else words[piece, j]
        part = (larger_magnitude_bf16x2 if source.dtype is torch.bfloat16 else larger_magnitude_f32)(part, bits)


def amax_of(part: Any, source: CastInput, scales: CastScales) -> Any:
    """The bits of amax as a float32, int32: so compared, NaN is above infinity above the rest."""
    bits = part
    if source.dtype is torch.bfloat16:
        bits = T.max(part << T.uint32(16), part & T.uint32(0xFFFF0000))
    amax = T.reinterpret(bits, "int32")
    return amax if scales.of_tensor else T.max(amax, float_bits(LIMITS["e2m1"][1]))


@T.macro
def scale_of_amax(amax: T.int32, tensor_sf: T.Buffer, scale: T.Buffer, scales: CastScales, of_words: bool) -> None:
    """scale[0], the bits of sf or for NVFP4 its byte, and scale[1], the bits of what codes are made with."""
    if scales.of_tensor and of_words:
        nvfp4_scale_of_amax(amax, tensor_sf[0], T.address_of(scale[0]))
    elif scales.of_tensor:
        tensor_scaled_macro()(amax, tensor_sf[0], scale)
    elif of_words and not scales.round_sf:
        e2m1_scale_of_amax(amax, T.address_of(scale[0]))
    else:
        scale_macro("e2m1", scales.round_sf)(amax, scale)


@T.macro
def encode_words(words: T.Buffer, codes: T.Buffer, piece: int, factor: T.uint32, scales: CastScales) -> None:
    """Codes of a piece of bfloat16 times a factor; for NVFP4, where they may saturate, times 1 / factor."""
    if scales.of_tensor:
        e2m1_by_sf(codes.shape[0], T.address_of(words[piece, 0]), factor, T.address_of(codes[0]))
    else:
        for j in T.unroll(codes.shape[0]):
            four = tuple(words[piece, 4 * j + k] for k in range(4))
            if scales.round_sf:
                twice = factor | (factor >> T.uint32(16))
                codes[j] = e2m1x8_by_power(four, twice, twice)
            else:
                as_float = T.reinterpret(factor, "float32")
                codes[j] = e2m1x8_by_float(four, as_float, as_float)


@T.macro
def encode_values(
    words: T.Buffer, values: T.Buffer, codes: T.Buffer, piece: int, factor: T.uint32, source: CastInput
) -> None:
    """Codes of a piece times a factor, by way of float32."""
    scaled = T.alloc_local((8 * codes.shape[0],), "float32")
    for j in T.unroll(8 * codes.shape[0]):
        value = values[piece, j] if source.is_pair else element(words, piece, j, source.dtype is torch.bfloat16)
        scaled[j] = value * T.reinterpret(factor, "float32")
    encode_macro("e2m1", 8 * codes.shape[0])(scaled, codes)


@T.macro
def store_bytes(
    sf: T.Buffer,
    value: T.uint32,
    four: T.Buffer,
    piece: int,
    row: T.int32,
    group: T.int32,
    lane: T.int32,
    has_sf: T.bool,
    valid: T.bool,
    lanes: tuple[int, int],
    apart: int,
    scales: CastScales,
) -> None:
    """Store sf of one byte, from its bits or for NVFP4 the byte; zeros for rows past the last token.

    `lanes`: how many have a group, and how many a word. Words of rows 32 apart are kept in `four` and stored with the
    last of them.
    """
    group_lanes, word_lanes = lanes
    word = T.alloc_var("uint32")
    word = value if scales.of_tensor else value >> T.uint32(23)
    word = T.if_then_else(valid, word, T.uint32(0))
    if word_lanes > group_lanes:
        word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
        word = word | T.shfl_xor(word, group_lanes)
        word = word | T.shfl_xor(word, 2 * group_lanes)
    four[piece] = word
    if has_sf and lane % word_lanes == 0:
        if apart == 32:
            if piece == 3:
                T.stg128(sf[row // 128, group // 4, row % 32, 0, 0], four[0:4])
        elif scales.layout is ScaleLayout.SWIZZLED:
            T.stg32(sf[row // 128, group // 4, row % 32, row % 128 // 32, 0], word)
        else:
            T.stg32(sf[row, group if scales.of_tensor else group // 4], word)
