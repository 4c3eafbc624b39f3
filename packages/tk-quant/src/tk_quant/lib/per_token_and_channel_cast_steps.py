"""Steps of per_token_and_channel_cast's kernel at thread level. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.row_amax import row_amax
from tk_quant.lib.division import quick_scale_of_amax
from tk_quant.lib.quantize import LIMITS, TILE_ROWS, element, encode_macro, float_bits
from tk_quant.lib.scales_io import scale_bytes, scale_place

CHANNELS = 128
"""Of a tile."""
VEC = 4
"""Channels of a thread."""
ROWS = 8
"""Of a warp at once."""
_LEAST_AMAX = float_bits(LIMITS["e4m3"][1])


def is_inside(channel: Any, hidden: int) -> Any:
    """Whether a tile's channel exists, which needs no test where tiles cover all channels exactly."""
    return channel < hidden if hidden % CHANNELS else True


def _larger(amax: Any, word: Any, is_bf16: bool) -> Any:
    return larger_magnitude_bf16x2(amax, word) if is_bf16 else larger_magnitude_f32(amax, word)


@T.macro
def cast_rows(
    words: Any, token_data: Any, token_sf: Any, row: Any, first_col: Any, hidden: Any, is_bf16: Any, casts: Any
) -> None:
    """The codes and scale factors of a warp's rows, from `row` on."""
    lane = T.get_thread_binding() % 32
    magnitudes = T.alloc_local((ROWS,), "uint32")
    scaled = T.alloc_local((VEC,), "float32")
    code = T.alloc_local((1,), "uint32")
    factor = T.alloc_var("float32")
    amax = T.alloc_var("int32")
    places = scale_bytes(token_sf, casts.layout)
    group_lanes, num_groups = casts.num_per_channels // VEC, ceil_div(hidden, casts.num_per_channels)
    for part in T.unroll(words.shape[0] // ROWS):
        for i in T.unroll(ROWS):
            magnitudes[i] = T.uint32(0)
            for j in T.unroll(words.shape[1]):
                magnitudes[i] = _larger(magnitudes[i], words[part * ROWS + i, j], is_bf16)
        amax = row_amax(T.address_of(magnitudes[0]), is_bf16, group_lanes)
        scale, own_factor = quick_scale_of_amax(T.max(amax, _LEAST_AMAX), "e4m3", casts.round_sf)
        token = row + part * ROWS + lane % ROWS
        group = first_col // casts.num_per_channels + lane // group_lanes
        if lane % group_lanes < ROWS and is_inside(group * casts.num_per_channels, hidden):
            if casts.layout is ScaleLayout.PACKED_UE8M0:
                exponent = T.cast(T.reinterpret(scale, "uint32") >> T.uint32(23), "uint8")
                places[scale_place(token, group, casts.layout)] = exponent
                if group == num_groups - 1:
                    for i in T.unroll(-num_groups % 4):
                        places[scale_place(token, num_groups + i, casts.layout)] = T.uint8(0)
            else:
                token_sf[token, group] = scale
        for i in T.unroll(ROWS):
            factor = T.shfl_sync(own_factor, lane // 8 * 8 + i)
            for j in T.unroll(VEC):
                scaled[j] = element(words, part * ROWS + i, j, is_bf16) * factor
            encode_macro("e4m3", VEC)(scaled, code)
            if is_inside(first_col + lane * VEC, hidden):
                T.stg32(token_data[row + part * ROWS + i, first_col + lane * VEC], code[0])


@T.macro
def share_amax(words: Any, parts: Any, is_bf16: Any) -> None:
    """Each thread's largest magnitudes of its channels to its warp's row of parts."""
    thread = T.get_thread_binding()
    amax = T.alloc_local((words.shape[1],), "uint32")
    for j in T.unroll(words.shape[1]):
        amax[j] = T.uint32(0)
    for i in T.unroll(words.shape[0]):
        for j in T.unroll(words.shape[1]):
            amax[j] = _larger(amax[j], words[i, j], is_bf16)
    for j in T.vectorized(words.shape[1]):
        parts[thread // 32, thread % 32 * words.shape[1] + j] = amax[j]


@T.macro
def make_factors(
    parts: Any, factors: Any, sf: Any, sf_row: Any, first_col: Any, hidden: Any, is_bf16: Any, round_sf: Any
) -> None:
    """Scale factors of a tile's channels to sf, and what to multiply with to factors (blocks of tokens, channels)."""
    threads, lanes = parts.shape[0] * 32, parts.shape[0] // factors.shape[0]
    amax = T.alloc_var("uint32")
    elements = T.view(parts, (parts.shape[0], CHANNELS), "uint16" if is_bf16 else "uint32")
    for k in T.unroll(ceil_div(factors.shape[0] * CHANNELS, threads)):
        index = k * threads + T.get_thread_binding()
        if index < factors.shape[0] * CHANNELS:
            amax = T.uint32(0)
            for i in T.unroll(lanes):
                amax = T.max(amax, T.cast(elements[index // CHANNELS * lanes + i, index % CHANNELS], "uint32"))
            bits = T.max(T.reinterpret(amax << T.uint32(16 if is_bf16 else 0), "int32"), _LEAST_AMAX)
            scale, factor = quick_scale_of_amax(bits, "e4m3", round_sf)
            if is_inside(first_col + index % CHANNELS, hidden):
                sf[sf_row + index // CHANNELS, first_col + index % CHANNELS] = scale
            factors[index // CHANNELS, index % CHANNELS] = factor


@T.macro
def put_codes(tile: Any, codes: Any, channel: Any, word: Any) -> None:
    """Codes of a channel, words of four tokens, to a tile whose chunks of 16 bytes are swizzled: no bank conflicts."""
    place = ((word // 4) ^ (channel // VEC % 8)) * 4 + word % 4
    for k in T.vectorized(codes.shape[1]):
        tile[channel, place + k] = codes[0, k]


@T.macro
def store_tile(tile: Any, out: Any, first_channel: Any, first_token: Any, hidden: Any, threads: Any) -> None:
    """The tile to out (hidden, num_tokens); eight lanes store the tokens of a channel."""
    thread = T.get_thread_binding()
    words = T.alloc_local((4,), "uint32")
    for i in T.unroll(CHANNELS * TILE_ROWS // 16 // threads):
        channel, chunk = i * (threads // 8) + thread // 8, thread % 8
        if is_inside(first_channel + channel, hidden):
            for k in T.vectorized(4):
                words[k] = tile[channel, (chunk ^ (channel // VEC % 8)) * 4 + k]
            T.stg128(out[first_channel + channel, first_token + chunk * 16], words[0:4])
