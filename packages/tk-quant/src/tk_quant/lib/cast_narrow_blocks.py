"""The kernel of per_block_cast for blocks of fewer than 8 channels, with or without data.

Thread by thread: at the tile level (128, 1) to e4m3 takes 11 % longer and (4, 4) to e2m1 18 % (H200). A thread keeps
`rows` tokens of 8 or 16 neighbouring channels, so several blocks side by side. Threads above each other that share a
block agree on its amax by shuffles; only where it is taller than a warp, by shared memory and a barrier too.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.bits import max_u16x2
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.fp8 import store_exponent
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.scaled_fp4 import e2m1_scale_of_amax, e2m1x8_by_float, e2m1x8_by_power
from tk_quant.lib.cast_formats import ELEMENTS, CastInput, CastScales
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

_WARPS, _MAX_BLOCKS_OF_THREAD = 8, 8


def _tokens_of_thread(block_size: tuple[int, int], vec: int, is_bf16: bool) -> int:
    """Tokens that a thread keeps."""
    block_tokens, block_channels = block_size
    if block_size == (1, 1) and is_bf16:
        return 2
    rows = 8 if block_tokens >= 8 else 4
    while rows > block_tokens and rows // block_tokens * (vec // block_channels) > _MAX_BLOCKS_OF_THREAD:
        rows //= 2
    return rows


# Every access has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def cast_narrow_blocks_kernel(
    source: CastInput,
    hidden: int,
    fmt: str,
    block_size: tuple[int, int],
    scales: CastScales,
    has_data: bool,
    arch: Arch,
) -> Any:
    """Build `per_block_cast(x, data, sf)`; data is None where sf alone is wanted."""
    import tilelang.language as T

    from tk_quant.lib.cast_tiles import input_type
    from tk_quant.lib.scales_io import scales_type

    block_tokens, block_channels = block_size
    is_bf16 = source.dtype is torch.bfloat16
    vec, per_word = 16 if is_bf16 and block_channels > 1 else 8, 4 // source.dtype.itemsize
    rows, lanes = _tokens_of_thread(block_size, vec, is_bf16), 64 // vec
    words_per_row, out_words, num_cols = vec // per_word, vec * BITS[fmt] // 32, ceil_div(hidden, block_channels)
    packed = scales.layout is ScaleLayout.PACKED_UE8M0
    # Codes straight from the words of x, by fewer instructions than from scaled float32: 4 channels of a block at once.
    of_words = is_bf16 and fmt == "e2m1" and has_data and block_channels == 4 and not arch.has_fp4_convert
    load, store_codes = load_macro(words_per_row, per_word, source.alignment), store_codes_macro(out_words)
    scale_of, encode = scale_macro(fmt, scales.round_sf), encode_macro(fmt, vec)
    larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32
    # Blocks of a thread, down and across; a part is a maximum, or a pair of them where bfloat16 are neighbours.
    down, across, in_pairs = max(rows // block_tokens, 1), vec // block_channels, is_bf16 and block_channels == 1
    rows_of_block, parts_across = rows // down, words_per_row if block_channels == 1 else across
    words_of_part, num_parts = words_per_row // parts_across, down * parts_across
    larger = max_u16x2 if in_pairs else T.max
    # Threads above each other that share a block, and warps that do.
    thread_rows, warp_rows = ceil_div(block_tokens, rows), 32 // lanes
    block_warps = ceil_div(thread_rows, warp_rows)
    tile_rows, col_tiles = _WARPS * warp_rows * rows, ceil_div(hidden, lanes * vec)
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def take_amax(words: T.Buffer, parts: T.Buffer, warp: T.int32, lane: T.int32) -> None:
        """The largest |x| of each part, as bits: those of NaN, the same for every NaN, are above those of infinity."""
        for k in T.unroll(num_parts):
            parts[k] = T.uint32(0)
        for i in T.unroll(rows):
            for j in T.unroll(words_per_row):
                k = i // rows_of_block * parts_across + j // words_of_part
                parts[k] = larger_magnitude(parts[k], words[i, j])
        for k in T.unroll(num_parts):
            if is_bf16 and not in_pairs:
                parts[k] = T.max(parts[k] << T.uint32(16), parts[k] & T.uint32(0xFFFF0000))
            for bit in T.unroll(min(thread_rows, warp_rows).bit_length() - 1):
                parts[k] = larger(parts[k], T.shfl_xor(parts[k], lanes << bit))
        if block_warps > 1:
            warp_parts = T.alloc_shared((_WARPS // block_warps, lanes, num_parts, block_warps), "uint32")
            others, place = T.alloc_local((block_warps,), "uint32"), lane % lanes
            if lane < lanes:
                for k in T.unroll(num_parts):
                    warp_parts[warp // block_warps, place, k, warp % block_warps] = parts[k]
            T.sync_threads()
            for k in T.unroll(num_parts):
                for i in T.vectorized(block_warps):
                    others[i] = warp_parts[warp // block_warps, place, k, i]
                for i in T.unroll(block_warps):
                    parts[k] = larger(parts[k], others[i])

    def amax_of(parts: T.Buffer, row: int, col: int) -> T.int32:
        """The bits of a block's amax as a float32."""
        bits = parts[row * parts_across + (col // per_word if block_channels == 1 else col)]
        if in_pairs:
            bits = T.if_then_else(col % 2 == 0, bits << T.uint32(16), bits & T.uint32(0xFFFF0000))
        return T.max(T.reinterpret(bits, "int32"), float_bits(LIMITS[fmt][1]))

    @T.macro
    def store_sf(sf: T.Buffer, codes: T.Buffer, row: T.int32, col: T.int32) -> None:
        """sf of a thread's blocks of a row. They are whole words, as hidden is a multiple of 64."""
        if packed and across % 4 == 0:
            for k in T.unroll(across // 4):
                word = T.alloc_var("uint32")
                word = T.uint32(0)
                for i in T.unroll(4):
                    word = word | (codes[4 * k + i] >> T.uint32(23)) << T.uint32(8 * i)
                sf[row, col // 4 + k] = T.reinterpret(word, "int32")
        elif packed:
            for k in T.unroll(across):
                store_exponent(T.access_ptr(sf[row, (col + k) // 4], "w"), (col + k) % 4, codes[k])
        elif scales.layout is ScaleLayout.ROW_MAJOR:
            store_codes_macro(across, 1)(sf, codes, row, col)
        else:
            for k in T.unroll(across):
                sf[row, col + k] = T.reinterpret(codes[k], "float32")

    @T.macro
    def store_row(words: T.Buffer, factors: T.Buffer, data: T.Buffer, i: int, row: T.int32, col: T.int32) -> None:
        codes, of_row = T.alloc_local((out_words,), "uint32"), i // rows_of_block
        if of_words:
            for j in T.unroll(out_words):
                first, second = factors[of_row, 2 * j], factors[of_row, 2 * j + 1]
                four = tuple(words[i, 4 * j + k] for k in range(4))
                if scales.round_sf:
                    twice = (first | (first >> T.uint32(16)), second | (second >> T.uint32(16)))
                    codes[j] = e2m1x8_by_power(four, *twice)
                else:
                    codes[j] = e2m1x8_by_float(four, T.reinterpret(first, "float32"), T.reinterpret(second, "float32"))
        else:
            scaled = T.alloc_local((vec,), "float32")
            for j in T.unroll(vec):
                factor = T.reinterpret(factors[of_row, j // block_channels], "float32")
                scaled[j] = element(words, i, j, is_bf16) * factor
            encode(scaled, codes)
        store_codes(data, codes, row, col * BITS[fmt] // 8)

    @T.prim_func
    def per_block_cast(
        x: input_type(source, num_tokens, hidden),
        data: T.Tensor((num_tokens, hidden * BITS[fmt] // 8), ELEMENTS[fmt]),
        # Row-major sf has strides that are arguments, too.
        sf: scales_type(T.dynamic("sf_rows"), num_cols, scales.layout if packed else ScaleLayout.COL_MAJOR),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=32 * _WARPS) as tile:
            T.annotate_min_blocks_per_sm(2)
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            thread_row = warp * warp_rows + lane // lanes
            # Variables: as parts of an address these would be divisions of 64 bits.
            row, col = T.alloc_var("int32"), T.alloc_var("int32")
            row = tile // col_tiles * tile_rows + thread_row * rows
            col = tile % col_tiles * (lanes * vec) + lane % lanes * vec
            inside = col < hidden
            words = T.alloc_local((rows, words_per_row), "uint32")
            parts, scale = T.alloc_local((num_parts,), "uint32"), T.alloc_local((2,), "uint32")
            factors, block_sf = T.alloc_local((down, across), "uint32"), T.alloc_local((across,), "uint32")
            for i in T.unroll(rows):
                load(x, words, i, row + i, col, inside and row + i < num_tokens)
            take_amax(words, parts, warp, lane)
            for i in T.unroll(down):
                first_row = row + i * rows_of_block
                for k in T.unroll(across):
                    if of_words and not scales.round_sf:
                        e2m1_scale_of_amax(amax_of(parts, i, k), T.address_of(scale[0]))
                    else:
                        scale_of(amax_of(parts, i, k), scale)
                    block_sf[k] = scale[0]
                    factors[i, k] = scale[1]
                if inside and first_row < num_tokens and thread_row % thread_rows == 0:
                    store_sf(sf, block_sf, first_row // block_tokens, col // block_channels)
            for i in T.unroll(rows):
                if has_data and inside and row + i < num_tokens:
                    store_row(words, factors, data, i, row + i, col)

    return per_block_cast
