"""Thread-level steps of the kernels that cast tiles of 128 tokens by channel. Only kernels import this.

A thread holds `vec` neighbouring channels of some tokens, as uint32 words of two bfloat16 or one float32.
"""

from typing import Any

import tilelang.language as T

from tk_core.macros.quantize import encode_e4m3, raised
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.cast.config import TILE_ROWS
from tk_quant.cast.scales import quick_sf_of_amax, sf_bytes, sf_index
from tk_quant.cast.words import element
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.row_amax import row_amax

CHANNELS = 128
"""Channels of a tile of per_token_and_channel_cast; VEC and ROWS are for that kernel too."""
VEC = 4
"""Channels of a thread."""
ROWS = 8
"""Tokens that a warp casts at a time in `cast_rows`."""


def is_inside(channel: Any, hidden: int, channels: int = CHANNELS) -> Any:
    """Whether a channel is below hidden; True, without a test at run time, if tiles of `channels` divide hidden."""
    return channel < hidden if hidden % channels else True


def _larger(amax: Any, word: Any, is_bf16: bool) -> Any:
    return larger_magnitude_bf16x2(amax, word) if is_bf16 else larger_magnitude_f32(amax, word)


@T.macro
def cast_rows(
    words: Any,
    token_data: Any,
    token_sf: Any,
    row: Any,
    first_col: Any,
    least_amax: Any,
    hidden: int,
    is_bf16: bool,
    casts: Any,
) -> None:
    """Cast a warp's rows, from `row` on, by groups of channels: store their codes and scale factors."""
    lane = T.get_thread_binding() % 32
    magnitudes = T.alloc_local((ROWS,), "uint32")
    scaled = T.alloc_local((VEC,), "float32")
    code = T.alloc_local((1,), "uint32")
    factor = T.alloc_var("float32")
    amax = T.alloc_var("int32")
    sf_codes = sf_bytes(token_sf, casts.layout)
    group_lanes, num_groups = casts.num_per_channels // VEC, ceil_div(hidden, casts.num_per_channels)
    for part in T.unroll(words.shape[0] // ROWS):
        for i in T.unroll(ROWS):
            magnitudes[i] = T.uint32(0)
            for j in T.unroll(words.shape[1]):
                magnitudes[i] = _larger(magnitudes[i], words[part * ROWS + i, j], is_bf16)
        amax = row_amax(T.address_of(magnitudes[0]), is_bf16, group_lanes)
        row_sf, row_factor = quick_sf_of_amax(raised(amax, least_amax), "e4m3", casts.round_sf)
        token = row + part * ROWS + lane % ROWS
        group = first_col // casts.num_per_channels + lane // group_lanes
        if lane % group_lanes < ROWS and is_inside(group * casts.num_per_channels, hidden):
            if casts.layout is ScaleLayout.PACKED_UE8M0:
                exponent = T.cast(T.reinterpret(row_sf, "uint32") >> T.uint32(23), "uint8")
                sf_codes[sf_index(token, group, casts.layout)] = exponent
                if group == num_groups - 1:
                    for i in T.unroll(-num_groups % 4):
                        sf_codes[sf_index(token, num_groups + i, casts.layout)] = T.uint8(0)
            else:
                token_sf[token, group] = row_sf
        for i in T.unroll(ROWS):
            factor = T.shfl_sync(row_factor, lane // 8 * 8 + i)
            for j in T.unroll(VEC):
                scaled[j] = element(words, part * ROWS + i, j, is_bf16) * factor
            encode_e4m3(scaled, code)
            if is_inside(first_col + lane * VEC, hidden):
                T.stg32(token_data[row + part * ROWS + i, first_col + lane * VEC], code[0])


@T.macro
def share_amax(words: Any, parts: Any, is_bf16: Any) -> None:
    """Store each thread's amax of each of its channels in shared memory: parts (row lanes, words of all channels)."""
    thread, lanes = T.get_thread_binding(), parts.shape[1] // words.shape[1]
    amax = T.alloc_local((words.shape[1],), "uint32")
    for j in T.unroll(words.shape[1]):
        amax[j] = T.uint32(0)
    for i in T.unroll(words.shape[0]):
        for j in T.unroll(words.shape[1]):
            amax[j] = _larger(amax[j], words[i, j], is_bf16)
    for j in T.vectorized(words.shape[1]):
        parts[thread // lanes, thread % lanes * words.shape[1] + j] = amax[j]


@T.macro
def make_factors(
    parts: Any,
    factors: Any,
    sf: Any,
    sf_row: Any,
    first_col: Any,
    least_amax: Any,
    hidden: int,
    threads: int,
    is_bf16: bool,
    round_sf: bool,
) -> None:
    """Reduce parts; store the tile's sf, and in factors (blocks of tokens, channels) the factors to multiply by."""
    blocks, channels = factors.shape
    lanes = parts.shape[0] // blocks
    amax = T.alloc_var("uint32")
    elements = T.view(parts, (parts.shape[0], channels), "uint16" if is_bf16 else "uint32")
    for k in T.unroll(ceil_div(blocks * channels, threads)):
        index = k * threads + T.get_thread_binding()
        if index < blocks * channels:
            amax = T.uint32(0)
            for i in T.unroll(lanes):
                amax = T.max(amax, T.cast(elements[index // channels * lanes + i, index % channels], "uint32"))
            bits = raised(T.reinterpret(amax << T.uint32(16 if is_bf16 else 0), "int32"), least_amax)
            column_sf, factor = quick_sf_of_amax(bits, "e4m3", round_sf)
            if is_inside(first_col + index % channels, hidden, channels):
                sf[sf_row + index // channels, first_col + index % channels] = column_sf
            factors[index // channels, index % channels] = factor


# The 128 bytes of a channel lie in eight chunks of 16; chunk k of channel c is at k ^ (c / vec % 8). So neither eight
# lanes that write `vec` channels each, nor eight that read one channel, have bank conflicts.
@T.macro
def put_codes(tile: Any, codes: Any, channel: Any, word: Any, vec: int) -> None:
    """Write codes of a channel, uint32 words of four tokens, to a tile in shared memory, uint32 (channels, 32)."""
    first = ((word // 4) ^ (channel // vec % 8)) * 4 + word % 4
    for k in T.vectorized(codes.shape[0]):
        tile[channel, first + k] = codes[k]


@T.macro
def store_tile(tile: Any, out: Any, first_channel: Any, first_token: Any, hidden: int, threads: int, vec: int) -> None:
    """Store the tile to out (hidden, num_tokens); eight lanes store the 128 tokens of a channel."""
    thread, channels = T.get_thread_binding(), tile.shape[0]
    words = T.alloc_local((4,), "uint32")
    for i in T.unroll(channels * TILE_ROWS // 16 // threads):
        channel, chunk = i * (threads // 8) + thread // 8, thread % 8
        if is_inside(first_channel + channel, hidden, channels):
            for k in T.vectorized(4):
                words[k] = tile[channel, (chunk ^ (channel // vec % 8)) * 4 + k]
            T.stg128(out[first_channel + channel, first_token + chunk * 16], words[0:4])
