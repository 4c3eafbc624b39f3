"""Blocks of one channel in the kernels that cast by channels: from a tile in registers to sf and factors.

A thread block has a tile of 128 rows by `num_channels`; each thread has `vec` channels of `rows` neighbouring rows of
it, as uint32 words of bfloat16 pairs or float32. The kernel has to place a barrier between `take_amax` and
`make_factors`, and another one after that.
"""

from functools import cache
from typing import Any

from tk_core.math import ceil_div
from tk_quant.device.division import scale_of_amax
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.lib.quantize import LIMITS, float_bits

TILE_ROWS = 128


@cache
def channel_block_macros(
    is_bf16: bool, rows: int, vec: int, num_channels: int, num_per_tokens: int, round_sf: bool, halves: int
) -> tuple[Any, Any, tuple[int, int]]:
    """Macros `take_amax(words, parts, row_lane, lane_col)` and `make_factors(parts, factors, sf, sf_row, col, end)`.

    Also returns the shape of `parts`, uint32 in shared memory, to which `take_amax` writes the largest |value| of each
    of a thread's channels, which start at lane_col. words: uint32 (rows, vec), of bfloat16 (rows, vec / 2).
    factors: float32 (128 / num_per_tokens, num_channels) in shared memory, by which values are to be multiplied.
    `make_factors` writes them, and sf to rows of `sf` from sf_row on, to columns from `col` to before `end`.
    """
    import tilelang.language as T

    per_word = 2 if is_bf16 else 1
    num_words = vec // per_word
    row_lanes = TILE_ROWS // rows
    threads = num_channels // vec * row_lanes
    num_factors = TILE_ROWS // num_per_tokens * num_channels
    lanes_per_block = num_per_tokens // rows
    # If there are enough threads, the first half of a warp reduces the even parts and computes sf, the second half
    # reduces the odd parts and computes the factor.
    halves = halves if threads >= 2 * num_factors else 1
    per_turn = threads // halves
    pitch = num_channels // per_word + (16 if halves == 2 else 0)  # padded to avoid bank conflicts of the halves
    larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32
    largest, least = LIMITS["e4m3"]
    least_amax = float_bits(least)

    @T.macro
    def take_amax(words: T.Buffer, parts: T.Buffer, row_lane: T.int32, lane_col: T.int32) -> None:
        amax = T.alloc_local((num_words,), "uint32")
        for j in T.unroll(num_words):
            amax[j] = T.uint32(0)
        for i in T.unroll(rows):
            for j in T.unroll(num_words):
                amax[j] = larger_magnitude(amax[j], words[i, j])
        for j in T.vectorized(num_words):
            parts[row_lane, lane_col // per_word + j] = amax[j]

    @T.macro
    def make_factors(
        parts: T.Buffer, factors: T.Buffer, sf: T.Buffer, sf_row: T.int32, col: T.int32, end: T.int32
    ) -> None:
        thread = T.get_thread_binding()
        half = thread // 16 % 2 if halves == 2 else 0
        scale = T.alloc_local((2,), "uint32")
        amax = T.alloc_var("uint32")
        elements = T.view(parts, (row_lanes, pitch * per_word), "uint16" if is_bf16 else "uint32")
        for k in T.unroll(ceil_div(num_factors, per_turn)):
            index = k * per_turn + (thread // 32 * 16 + thread % 16 if halves == 2 else thread)
            block, channel = index // num_channels, index % num_channels
            if index < num_factors:
                amax = T.uint32(0)
                for i in T.unroll(lanes_per_block // halves):
                    part = elements[block * lanes_per_block + i * halves + half, channel]
                    amax = T.max(amax, T.cast(part, "uint32"))
                if halves == 2:
                    amax = T.max(amax, T.shfl_xor(amax, 16))
                if is_bf16:
                    amax = amax << T.uint32(16)
                amax = T.max(amax, T.uint32(least_amax))
                if halves == 2 and not round_sf:
                    value = T.reinterpret(amax, "float32")
                    above = T.if_then_else(half == 0, value, T.float32(largest))
                    below = T.if_then_else(half == 0, T.float32(largest), value)
                    scale[0] = T.reinterpret(above / below, "uint32")
                    scale[1] = scale[0]
                else:
                    bits = T.reinterpret(amax, "int32")
                    scale_of_amax(bits, T.address_of(scale[0]), T.address_of(scale[1]), round_sf)
                if (half == 0) and col + channel < end:
                    sf[sf_row + block, col + channel] = T.reinterpret(scale[0], "float32")
                if half == halves - 1:
                    factors[block, channel] = T.reinterpret(scale[1], "float32")

    return take_amax, make_factors, (row_lanes, pitch)
