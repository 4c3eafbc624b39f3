"""The kernel of per_block_cast and its relatives: blocks of tokens and channels, each with a scale factor.

A thread keeps `rows` tokens of `vec` neighbouring channels in registers, from the load to the store. Threads that share
a block agree on its amax by shuffles; only where it is taller than a warp, by shared memory and a barrier too.

       a warp: lanes × vec channels               e.g. bfloat16, vec 16, rows 4:
     ┌────┬────┬─  ─┬────────┐
     │ l0 │ l1 │  … │        │ } rows            (128, 128)  8 lanes wide, 16 tokens high, eight warps a block
     ├────┼────┼─  ─┼────────┤                   (32, 32)    4 lanes wide, 32 tokens high, two blocks a warp
     │    │    │    │        │ } rows            (1, 128)    8 lanes wide, 16 blocks a warp
     └────┴────┴─  ─┴────────┘                   (128, 1)    8 channels a thread, each a block of its own
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.bits import max_u16x2
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.fp8 import cast_elements_bf16x8, store_exponent
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.scaled_fp4 import e2m1_by_sf, e2m1_scale_of_amax, e2m1x8_by_float, e2m1x8_by_power
from tk_quant.lib.quantize import (
    BITS,
    LIMITS,
    element,
    encode_macro,
    float_bits,
    load_macro,
    scale_macro,
    store_codes_macro,
)

_MAX_BLOCKS_OF_THREAD = 8

CAST, SF_ONLY, PRECOMPUTED = "cast", "sf_only", "precomputed"
"""What the kernel does: data and sf, sf alone, data with sf as given."""


@dataclass(frozen=True)
class PerBlockCastConfig:
    """Launch knobs: what a thread keeps, and how the threads of a block lie over rows and channels."""

    vec: int
    """Neighbouring channels of a thread."""
    rows: int
    """Tokens of a thread."""
    lanes: int
    """Threads of a warp side by side; the rest of its 32 are below."""
    warps: int
    """Warps of a block, below each other."""
    blocks_per_sm: int
    """Blocks that registers must allow on a multiprocessor."""
    streaming: bool = False
    """Whether caches are told that x is read once."""

    @staticmethod
    @cache
    def best(block_size: tuple[int, int], itemsize: int, fmt: str, packed: bool, arch: Arch) -> "PerBlockCastConfig":
        """The configuration for a block, an input's element size, a format and packed sf or not on an architecture."""
        block_tokens, block_channels = block_size
        vec, rows = (16 if itemsize == 2 else 8), 4
        if block_channels == 1:
            vec = 8
        if block_tokens >= 8 > block_channels:
            rows = 8
        blocks_across = max(vec // block_channels, 1)
        while rows > block_tokens and rows // block_tokens * blocks_across > _MAX_BLOCKS_OF_THREAD:
            rows //= 2
        lanes = max(block_channels, 64) // vec
        if block_size == (1, 1) and itemsize == 2:
            rows = 4 if fmt == "e4m3" and packed else 2
        warps = ceil_div(block_tokens, rows * (32 // lanes))
        if fmt == "e2m1" and itemsize == 2 and min(block_size) >= 32:
            # Four times as much is read as written: small blocks, and enough of them.
            if block_size == (32, 32) and not packed:
                return PerBlockCastConfig(8, 4, 16, 4, 8, True)
            warps = max(warps, 2)
            return PerBlockCastConfig(vec, rows, lanes, warps, 24 // warps, True)
        return PerBlockCastConfig(vec, rows, lanes, max(warps, 8), 2)


# Every access has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def per_block_cast_kernel(
    hidden: int,
    dtype: torch.dtype,
    alignment: int,
    fmt: str,
    block_size: tuple[int, int],
    mode: str,
    round_sf: bool,
    layout: ScaleLayout,
    config: PerBlockCastConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    block_tokens, block_channels = block_size
    vec, rows, lanes, warps = config.vec, config.rows, config.lanes, config.warps
    is_bf16 = dtype is torch.bfloat16
    per_word = 4 // dtype.itemsize
    words_per_row = vec // per_word
    out_words = vec * BITS[fmt] // 32
    out_per_byte = 8 // BITS[fmt]
    num_block_cols = ceil_div(hidden, block_channels)
    packed = layout is ScaleLayout.PACKED_UE8M0
    least_amax = float_bits(LIMITS[fmt][1])
    # Codes straight from the words of x, by fewer instructions than from scaled float32: 4 channels of a block at once,
    # or 8 with a precomputed sf, which may make data saturate.
    least_channels = 8 if mode == PRECOMPUTED else 4
    from_words = is_bf16 and fmt == "e2m1" and mode != SF_ONLY and block_channels >= least_channels
    from_words = from_words and not arch.has_fp4_convert
    words_per_call = min(vec, block_channels) // 8
    # Elements each with an sf of their own.
    of_elements = is_bf16 and fmt == "e4m3" and block_size == (1, 1) and packed
    assert not of_elements or (vec == 8 and rows == 4)
    load, store_codes = load_macro(words_per_row, per_word, alignment, config.streaming), store_codes_macro(out_words)
    scale_of, encode = scale_macro(fmt, round_sf), encode_macro(fmt, vec)
    larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32

    # Blocks of a thread, down and across; a part is a maximum, or a pair of them where bfloat16 are neighbours.
    blocks_down, blocks_across = max(rows // block_tokens, 1), max(vec // block_channels, 1)
    rows_of_block = rows // blocks_down
    parts_across = words_per_row if block_channels == 1 else blocks_across
    words_of_part = words_per_row // parts_across
    num_parts = blocks_down * parts_across
    # Threads that share a block: of a row of lanes, of a column of a warp, and warps.
    block_lanes, thread_rows = ceil_div(block_channels, vec), ceil_div(block_tokens, rows)
    warp_rows = 32 // lanes
    block_warp_rows, block_warps = min(thread_rows, warp_rows), ceil_div(thread_rows, warp_rows)
    blocks_per_row = lanes // block_lanes
    assert lanes % block_lanes == 0
    assert warps % block_warps == 0
    tile_rows, tile_cols = warps * warp_rows * rows, lanes * vec
    col_tiles = ceil_div(hidden, tile_cols)
    threads = 32 * warps

    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride")
    sf_rows, sf_row_stride, sf_col_stride = T.dynamic("sf_rows"), T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    sf_shape = (sf_rows, ceil_div(num_block_cols, 4) if packed else num_block_cols)
    sf_type = T.StridedTensor(sf_shape, (sf_row_stride, sf_col_stride), "int32" if packed else "float32")
    # Where a variant has no data, the caller passes sf once more.
    data_type = sf_type
    if mode != SF_ONLY:
        data_type = T.Tensor((num_tokens, hidden // out_per_byte), "float8_e4m3fn" if fmt == "e4m3" else "int8")

    @T.macro
    def take_amax(words: T.Buffer, parts: T.Buffer) -> None:
        """The largest |x| of each part, as bits: those of NaN, the same for every NaN, are above those of infinity."""
        for k in T.unroll(num_parts):
            parts[k] = T.uint32(0)
        for i in T.unroll(rows):
            for j in T.unroll(words_per_row):
                k = i // rows_of_block * parts_across + j // words_of_part
                parts[k] = larger_magnitude(parts[k], words[i, j])
        for k in T.unroll(num_parts):
            if is_bf16 and block_channels > 1:
                parts[k] = T.max(parts[k] << T.uint32(16), parts[k] & T.uint32(0xFFFF0000))

    def larger(a: T.uint32, b: T.uint32) -> T.uint32:
        return max_u16x2(a, b) if is_bf16 and block_channels == 1 else T.max(a, b)

    @T.macro
    def share_amax(parts: T.Buffer, warp: T.int32, lane: T.int32) -> None:
        """The same among all threads of a block."""
        for k in T.unroll(num_parts):
            for bit in T.unroll(block_lanes.bit_length() - 1):
                parts[k] = larger(parts[k], T.shfl_xor(parts[k], 1 << bit))
            for bit in T.unroll(block_warp_rows.bit_length() - 1):
                parts[k] = larger(parts[k], T.shfl_xor(parts[k], lanes << bit))
        if block_warps > 1:
            warp_parts = T.alloc_shared((warps // block_warps, blocks_per_row, num_parts, block_warps), "uint32")
            others = T.alloc_local((block_warps,), "uint32")
            place = lane % lanes // block_lanes
            if lane < lanes and lane % block_lanes == 0:
                for k in T.unroll(num_parts):
                    warp_parts[warp // block_warps, place, k, warp % block_warps] = parts[k]
            T.sync_threads()
            for k in T.unroll(num_parts):
                for i in T.vectorized(block_warps):
                    others[i] = warp_parts[warp // block_warps, place, k, i]
                for i in T.unroll(block_warps):
                    parts[k] = larger(parts[k], others[i])

    def amax_of(parts: T.Buffer, down: int, across: int) -> T.int32:
        """The bits of a block's amax as a float32."""
        bits = parts[down * parts_across + (across // per_word if block_channels == 1 else across)]
        if is_bf16 and block_channels == 1:
            bits = T.if_then_else(across % 2 == 0, bits << T.uint32(16), bits & T.uint32(0xFFFF0000))
        return T.max(T.reinterpret(bits, "int32"), least_amax)

    @T.macro
    def store_exponents(sf: T.Buffer, codes: T.Buffer, row: T.int32, col: T.int32) -> None:
        """The exponents of a thread's blocks of a row, and zeros behind the last block of all."""
        if blocks_across % 4 == 0:
            for k in T.unroll(blocks_across // 4):
                word = T.alloc_var("uint32")
                word = T.uint32(0)
                for i in T.unroll(4):
                    word = word | (codes[4 * k + i] >> T.uint32(23)) << T.uint32(8 * i)
                sf[row, col // 4 + k] = T.reinterpret(word, "int32")
        else:
            for k in T.unroll(blocks_across):
                store_exponent(T.access_ptr(sf[row, (col + k) // 4], "w"), (col + k) % 4, codes[k])
            if num_block_cols % 4 != 0 and col + blocks_across == num_block_cols:
                for k in T.unroll(-num_block_cols % 4):
                    index = num_block_cols % 4 + k
                    store_exponent(T.access_ptr(sf[row, col // 4], "w"), index, T.uint32(0))

    @T.macro
    def store_sf(sf: T.Buffer, codes: T.Buffer, row: T.int32, col: T.int32) -> None:
        if packed:
            store_exponents(sf, codes, row, col)
        elif layout is ScaleLayout.ROW_MAJOR and blocks_across > 1:
            store_words = store_codes_macro(blocks_across, 1)
            store_words(sf, codes, row, col)
        else:
            for k in T.unroll(blocks_across):
                sf[row, col + k] = T.reinterpret(codes[k], "float32")

    @T.macro
    def store_row(words: T.Buffer, factors: T.Buffer, data: T.Buffer, i: int, row: T.int32, col: T.int32) -> None:
        codes = T.alloc_local((out_words,), "uint32")
        down = i // rows_of_block
        if from_words and mode == PRECOMPUTED:
            for j in T.unroll(out_words // words_per_call):
                k = j * words_per_call
                factor = factors[down, 8 * k // block_channels]
                e2m1_by_sf(words_per_call, T.address_of(words[i, 4 * k]), factor, T.address_of(codes[k]))
        elif from_words:
            for j in T.unroll(out_words):
                first, second = factors[down, 8 * j // block_channels], factors[down, (8 * j + 4) // block_channels]
                four = tuple(words[i, 4 * j + k] for k in range(4))
                if round_sf:
                    twice = (first | (first >> T.uint32(16)), second | (second >> T.uint32(16)))
                    codes[j] = e2m1x8_by_power(four, *twice)
                else:
                    scales = (T.reinterpret(first, "float32"), T.reinterpret(second, "float32"))
                    codes[j] = e2m1x8_by_float(four, *scales)
        else:
            scaled = T.alloc_local((vec,), "float32")
            for j in T.unroll(vec):
                factor = T.reinterpret(factors[down, j // block_channels], "float32")
                scaled[j] = element(words, i, j, is_bf16) * factor
            encode(scaled, codes)
        store_codes(data, codes, row, col // out_per_byte)

    @T.macro
    def cast_elements(
        words: T.Buffer, data: T.Buffer, sf: T.Buffer, row: T.int32, col: T.int32, num_rows: T.int32
    ) -> None:
        """Four rows of eight blocks, of which num_rows are there: words of sf are neighbours where rows are."""
        codes = T.alloc_local((2,), "uint32")
        exponents = T.alloc_local((2, 4), "uint32")
        for i in T.unroll(4):
            cast_elements_bf16x8(T.address_of(words[i, 0]), T.address_of(codes[0]), T.address_of(exponents[0, i]), 4)
            if mode == CAST and i < num_rows:
                store_codes(data, codes, row + i, col)
        for k in T.unroll(2):
            if num_rows >= 4:
                T.stg128(sf[row, col // 4 + k], exponents[k, 0:4])
            else:
                for i in T.unroll(3):
                    if i < num_rows:
                        sf[row + i, col // 4 + k] = T.reinterpret(exponents[k, i], "int32")

    @T.prim_func
    def per_block_cast(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), T.dtype(dtype)), data: data_type, sf: sf_type
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=threads) as tile:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            thread_row = warp * warp_rows + lane // lanes
            # Variables: as parts of an address these would be divisions of 64 bits.
            row = T.alloc_var("int32")
            row = tile // col_tiles * tile_rows + thread_row * rows
            col = T.alloc_var("int32")
            col = tile % col_tiles * tile_cols + lane % lanes * vec
            # hidden is a multiple of vec, and of block_channels where a thread has several blocks of a row.
            inside = col < hidden
            words = T.alloc_local((rows, words_per_row), "uint32")
            parts = T.alloc_local((num_parts,), "uint32")
            scale = T.alloc_local((2,), "uint32")
            factors = T.alloc_local((blocks_down, blocks_across), "uint32")
            scales = T.alloc_local((blocks_across,), "uint32")

            for i in T.unroll(rows):
                load(x, words, i, row + i, col, inside and row + i < num_tokens)
            if of_elements:
                cast_elements(words, data, sf, row, col, T.if_then_else(inside, num_tokens - row, 0))
            else:
                if mode != PRECOMPUTED:
                    take_amax(words, parts)
                    share_amax(parts, warp, lane)
                for i in T.unroll(blocks_down):
                    first_row = row + i * rows_of_block
                    valid = inside and first_row < num_tokens
                    sf_row, sf_col = first_row // block_tokens, col // block_channels
                    for k in T.unroll(blocks_across):
                        if mode == PRECOMPUTED:
                            given = T.if_then_else(valid, sf[sf_row, sf_col + k], T.float32(1))
                            factors[i, k] = T.reinterpret(given if from_words else T.float32(1) / given, "uint32")
                        else:
                            if from_words and not round_sf:
                                e2m1_scale_of_amax(amax_of(parts, i, k), T.address_of(scale[0]))
                            else:
                                scale_of(amax_of(parts, i, k), scale)
                            scales[k] = scale[0]
                            factors[i, k] = scale[1]
                    writes_sf = valid and lane % block_lanes == 0 and thread_row % thread_rows == 0
                    if mode != PRECOMPUTED and writes_sf:
                        store_sf(sf, scales, sf_row, sf_col)
                if mode != SF_ONLY:
                    for i in T.unroll(rows):
                        if inside and row + i < num_tokens:
                            store_row(words, factors, data, i, row + i, col)

    return per_block_cast
