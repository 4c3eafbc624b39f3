"""The kernel of per_token_cast and its relatives; see per_token_cast.py for the formulas and a picture."""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.bits import warp_max_u32
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.fp4 import decode_e2m1x4
from tk_quant.device.fp8 import decode_e4m3x4_f16, decode_ue8m0
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f16x2, larger_magnitude_f32
from tk_quant.device.scaled_fp4 import (
    e2m1_by_sf,
    e2m1_scale_of_amax,
    e2m1x8_by_float,
    e2m1x8_by_power,
    e2m1x8_of_e4m3,
    nvfp4_scale_of_amax,
)
from tk_quant.lib.per_token_cast_config import (
    PRECOMPUTED,
    SF_ONLY,
    PerTokenCastConfig,
    casts_codes,
    fits_warp,
    unit_lanes,
)
from tk_quant.lib.quantize import (
    BITS,
    LIMITS,
    element,
    encode_macro,
    float_bits,
    load_codes_macro,
    load_macro,
    scale_macro,
    store_codes_macro,
    tensor_scaled_macro,
)

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1", torch.uint8: "e5m6"}
"""Format by dtype of the data."""
ROWS_OF_SWIZZLED_TILE = 128

_ELEMENTS = {"e4m3": "float8_e4m3fn", "e2m1": "int8", "e5m6": "uint8"}
# Words of shared memory for the amax of each warp; the rest is for codes on their way out.
_AMAX_WORDS = 32


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them, and barriers are where
# they must be.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True})
def per_token_cast_kernel(
    x_dtype: torch.dtype,
    alignment: int,
    x_block_size: tuple[int, int] | None,
    x_layout: ScaleLayout | None,
    hidden: int,
    fmt: str,
    num_per_channels: int,
    mode: str,
    round_sf: bool,
    has_tensor_sf: bool,
    layout: ScaleLayout,
    config: PerTokenCastConfig,
    arch: Arch,
) -> Any:
    """Build `per_token_cast(x, x_sf, tensor_sf, data, sf)`, 0 standing for what there is none of.

    ROW_MAJOR serves COL_MAJOR too: strides of float32 sf are arguments.
    """
    import tilelang.language as T

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    is_pair = x_block_size is not None
    x_fmt = FORMATS.get(x_dtype)
    x_bits = BITS[x_fmt] if is_pair else 8 * x_dtype.itemsize
    x_words = vec * x_bits // 32
    is_bf16 = x_dtype is torch.bfloat16
    # Codes straight from the words of x, by fewer instructions than from scaled float32.
    from_words = is_bf16 and fmt == "e2m1" and mode != SF_ONLY and not arch.has_fp4_convert
    may_saturate = has_tensor_sf or mode == PRECOMPUTED
    out_words = vec * BITS[fmt] // 32
    staged = fmt == "e5m6"
    swizzled = layout is ScaleLayout.SWIZZLED
    fours = config.apart == 32
    in_bytes = has_tensor_sf or layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)

    num_groups = ceil_div(hidden, num_per_channels)
    by_warp = fits_warp(num_per_channels, vec) and not staged
    group_lanes = num_per_channels // vec
    share_word = in_bytes and num_groups > 1
    if by_warp:
        lanes_of_unit = unit_lanes(hidden, num_per_channels, vec, share_word)
        assert lanes_of_unit <= 32
        assert lanes % lanes_of_unit == 0
        assert config.apart == 1 or (fours and swizzled and pieces == 4 and 32 % config.rows == 0)
        col_tiles = ceil_div(align(ceil_div(hidden, vec), lanes_of_unit), lanes)
        threads = align(lanes * config.rows, 32)
        tile_rows = config.rows * pieces
    else:
        assert lanes % 32 == 0
        assert lanes * pieces * vec >= hidden
        threads = lanes
        tile_rows = col_tiles = 1
    num_warps = threads // 32
    chunks = pieces * out_words * 8
    """Sixteen bytes of a warp's codes each."""

    scale_of = scale_macro(fmt, round_sf)
    from_codes = casts_codes(x_fmt, x_block_size, x_layout, hidden, fmt, num_per_channels, mode, round_sf, arch)
    encode, store_codes = encode_macro(fmt, vec), store_codes_macro(out_words)
    if is_pair:
        load_codes = load_codes_macro(_ELEMENTS[x_fmt], pieces, vec * x_bits // 8, min(alignment, 16), config.streaming)
        # One scale factor for a piece, or one for each of its elements where blocks are narrower or odd.
        sf_per_piece = 1 if x_block_size[1] % vec == 0 or x_block_size[1] >= hidden else vec
        x_in_bytes = x_layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)
    else:
        sf_per_piece = 1
        load_plain = load_macro(x_words, 4 // x_dtype.itemsize, alignment, config.streaming)
    larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32

    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride")
    x_type = T.StridedTensor((num_tokens, hidden * x_bits // (8 * x_dtype.itemsize)), (x_stride, 1), T.dtype(x_dtype))
    x_sf_type, data_type, tensor_sf_type = T.int32, T.int32, T.int32
    sf_names = ("sf_rows", "sf_row_stride", "sf_col_stride")
    byte_dtype = "float8_e4m3fn" if has_tensor_sf else "float8_e8m0fnu"

    def type_of_sf(num_cols: int, layout: ScaleLayout, prefix: str = "") -> Any:
        rows, row_stride, col_stride = (T.dynamic(prefix + name) for name in sf_names)
        if layout is ScaleLayout.SWIZZLED:
            return T.Tensor((rows, ceil_div(num_cols, 4), 32, 4, 4), "float8_e8m0fnu" if prefix else byte_dtype)
        if has_tensor_sf and not prefix:
            return T.Tensor((rows, num_cols), byte_dtype)
        packed = layout is ScaleLayout.PACKED_UE8M0
        shape = (rows, ceil_div(num_cols, 4) if packed else num_cols)
        return T.StridedTensor(shape, (row_stride, col_stride), "int32" if packed else "float32")

    sf_type = type_of_sf(num_groups, layout)
    if is_pair:
        x_sf_type = type_of_sf(ceil_div(hidden, x_block_size[1]), x_layout, "x_")
    if has_tensor_sf:
        tensor_sf_type = T.Tensor((1,), "float32")
    if mode != SF_ONLY:
        data_type = T.Tensor((num_tokens, hidden * BITS[fmt] // 8), _ELEMENTS[fmt])

    @T.macro
    def load_piece(x: T.Buffer, words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        if is_pair:
            load_codes(x, words, piece, row, col * x_bits // 8, valid)
        else:
            load_plain(x, words, piece, row, col, valid)

    @T.macro
    def load_factors(x_sf: T.Buffer, factors: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        word = T.alloc_var("uint32")
        for j in T.unroll(sf_per_piece):
            sf_row, sf_col = row // x_block_size[0], (col + j) // x_block_size[1]
            if x_layout is ScaleLayout.SWIZZLED:
                word = T.ldg32(x_sf[sf_row // 128, sf_col // 4, sf_row % 32, sf_row % 128 // 32, 0], pred=valid)
            else:
                word = T.ldg32(x_sf[sf_row, sf_col // 4 if x_in_bytes else sf_col], pred=valid)
            if x_in_bytes:
                factors[piece, j] = decode_ue8m0(word, sf_col % 4)
            else:
                factors[piece, j] = T.reinterpret(word, "float32")

    @T.macro
    def dequantize_piece(words: T.Buffer, factors: T.Buffer, values: T.Buffer, piece: int, valid: T.bool) -> None:
        if x_fmt == "e4m3":
            codes = T.view(words, (pieces, vec), "float8_e4m3fn")
            for j in T.vectorized(vec):
                values[piece, j] = T.cast(codes[piece, j], "float32")
        else:
            for j in T.unroll(vec // 4):
                half = words[piece, j // 2] >> T.uint32(j % 2 * 16)
                decode_e2m1x4(half, T.address_of(values[piece, 4 * j]))
        for j in T.unroll(vec):
            # What the words hold is unspecified where nothing was read.
            value = values[piece, j] * factors[piece, j % sf_per_piece]
            values[piece, j] = T.if_then_else(valid, value, T.float32(0))

    @T.macro
    def take_amax(words: T.Buffer, values: T.Buffer, piece: int, part: T.Ref) -> None:
        """The larger of part and every |x| of a piece; of bfloat16, both halves for themselves."""
        for j in T.unroll(vec if is_pair else x_words):
            bits = T.reinterpret(values[piece, j], "uint32") if is_pair else words[piece, j]
            part = larger_magnitude(part, bits)

    def amax_of(part: T.uint32) -> T.int32:
        """The bits of amax as a float32: so compared, NaN is above infinity above the rest."""
        bits = T.max(part << T.uint32(16), part & T.uint32(0xFFFF0000)) if is_bf16 else part
        amax = T.reinterpret(bits, "int32")
        return amax if has_tensor_sf else T.max(amax, float_bits(LIMITS[fmt][1]))

    @T.macro
    def encode_piece(words: T.Buffer, values: T.Buffer, codes: T.Buffer, piece: int, factor: T.uint32) -> None:
        """Codes of a piece times factor, or where they may saturate by 1 / factor."""
        if from_words and may_saturate:
            e2m1_by_sf(out_words, T.address_of(words[piece, 0]), factor, T.address_of(codes[0]))
        elif from_words:
            for j in T.unroll(out_words):
                four = tuple(words[piece, 4 * j + k] for k in range(4))
                if round_sf:
                    twice = factor | (factor >> T.uint32(16))
                    codes[j] = e2m1x8_by_power(four, twice, twice)
                else:
                    scale = T.reinterpret(factor, "float32")
                    codes[j] = e2m1x8_by_float(four, scale, scale)
        else:
            scaled = T.alloc_local((vec,), "float32")
            for j in T.unroll(vec):
                value = values[piece, j] if is_pair else element(words, piece, j, is_bf16)
                scaled[j] = value * T.reinterpret(factor, "float32")
            encode(scaled, codes)

    @T.macro
    def store_word(sf: T.Buffer, word: T.uint32, row: T.int32, col: T.int32) -> None:
        """Four sf of one byte each."""
        if swizzled:
            T.stg32(sf[row // 128, col // 4, row % 32, row % 128 // 32, 0], word)
        else:
            T.stg32(sf[row, col if has_tensor_sf else col // 4], word)

    @T.macro
    def store_sf(
        sf: T.Buffer,
        value: T.uint32,
        four: T.Buffer,
        piece: int,
        row: T.int32,
        col: T.int32,
        lane: T.int32,
        inside: T.bool,
        valid: T.bool,
    ) -> None:
        """Store what lanes of a group have in common; `inside` also where sf has rows past the last token.

        Words of rows 32 apart are kept in `four` and stored with the last of them.
        """
        if in_bytes:
            word = T.alloc_var("uint32")
            word = value if has_tensor_sf else value >> T.uint32(23)
            word = T.if_then_else(valid, word, T.uint32(0))
            if share_word:
                word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
                word = word | T.shfl_xor(word, group_lanes)
                word = word | T.shfl_xor(word, 2 * group_lanes)
            four[piece] = word
            if inside and lane % (4 * group_lanes if share_word else group_lanes) == 0:
                if not fours:
                    store_word(sf, word, row, col // num_per_channels)
                elif piece == 3:
                    T.stg128(sf[row // 128, col // num_per_channels // 4, row % 32, 0, 0], four[0:4])
        elif valid and lane % group_lanes == 0:
            sf[row, col // num_per_channels] = T.reinterpret(value, "float32")

    num_rows = T.ceildiv(num_tokens, ROWS_OF_SWIZZLED_TILE) * ROWS_OF_SWIZZLED_TILE if swizzled else num_tokens

    @T.macro
    def cast_groups(
        x: T.Buffer, x_sf: T.Buffer, tensor_sf: T.Buffer, data: T.Buffer, sf: T.Buffer, block: T.int32
    ) -> None:
        """Groups of a few lanes."""
        thread = T.get_thread_binding()
        lane = thread % lanes
        # Variables: as parts of an address these would be divisions of 64 bits.
        first_row = T.alloc_var("int32")
        first_row = block // col_tiles * config.rows + thread // lanes
        first_row = first_row // config.apart * (config.apart * pieces) + first_row % config.apart
        col = T.alloc_var("int32")
        col = (block % col_tiles * lanes + lane) * vec
        inside = col < hidden and thread < lanes * config.rows
        words = T.alloc_local((pieces, x_words), "uint32")
        values = T.alloc_local((pieces, vec) if is_pair else (1, 1), "float32")
        codes = T.alloc_local((out_words,), "uint32")
        part = T.alloc_var("uint32")
        amax = T.alloc_var("int32")
        scale = T.alloc_local((2,), "uint32")
        factors = T.alloc_local((pieces, sf_per_piece), "float32")
        halves = T.alloc_local((vec // 2,), "uint32")
        given, four = T.alloc_local((pieces,), "float32"), T.alloc_local((pieces,), "uint32")
        for i in T.unroll(pieces):
            row = first_row + i * config.apart
            load_piece(x, words, i, row, col, inside and row < num_tokens)
        for i in T.unroll(pieces):
            row = first_row + i * config.apart
            valid = inside and row < num_tokens
            if is_pair:
                load_factors(x_sf, factors, i, row, col, valid)
            if mode == PRECOMPUTED:
                given[i] = T.reinterpret(T.ldg32(sf[row, col // num_per_channels], pred=valid), "float32")
        for i in T.unroll(pieces):
            row = first_row + i * config.apart
            valid = inside and row < num_tokens
            if from_codes:
                for j in T.unroll(x_words):
                    decode_e4m3x4_f16(words[i, j], T.address_of(halves[2 * j]))
            elif is_pair:
                dequantize_piece(words, factors, values, i, valid)
            if mode == PRECOMPUTED:
                given[i] = T.if_then_else(valid, given[i], T.float32(1))
                scale[1] = T.reinterpret(given[i] if from_words else T.float32(1) / given[i], "uint32")
            else:
                part = T.uint32(0)
                if from_codes:
                    for j in T.unroll(vec // 2):
                        part = larger_magnitude_f16x2(part, halves[j])
                    larger_half = T.cast(T.max(part & T.uint32(0xFFFF), part >> T.uint32(16)), "uint16")
                    value = T.cast(T.reinterpret(larger_half, "float16"), "float32") * factors[i, 0]
                    part = T.if_then_else(valid, T.reinterpret(value, "uint32"), T.uint32(0))
                else:
                    take_amax(words, values, i, part)
                amax = amax_of(part)
                for j in T.unroll(group_lanes.bit_length() - 1):
                    amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                if has_tensor_sf and from_words:
                    nvfp4_scale_of_amax(amax, tensor_sf[0], T.address_of(scale[0]))
                elif has_tensor_sf:
                    tensor_scaled_macro()(amax, tensor_sf[0], scale)
                elif from_words and not round_sf:
                    e2m1_scale_of_amax(amax, T.address_of(scale[0]))
                else:
                    scale_of(amax, scale)
                store_sf(sf, scale[0], four, i, row, col, lane, inside and row < num_rows, valid)
            if mode != SF_ONLY:
                if from_codes:
                    factor = T.reinterpret(scale[1], "float32") * factors[i, 0]
                    for j in T.unroll(out_words):
                        codes[j] = e2m1x8_of_e4m3(
                            words[i, 2 * j], words[i, 2 * j + 1], T.address_of(halves[4 * j]), factor
                        )
                else:
                    encode_piece(words, values, codes, i, scale[1])
                if valid:
                    store_codes(data, codes, row, col * BITS[fmt] // 8)

    @T.macro
    def cast_row(x: T.Buffer, x_sf: T.Buffer, data: T.Buffer, sf: T.Buffer, row: T.int32) -> None:
        """A row that is one group."""
        thread = T.get_thread_binding()
        warp = thread // 32
        words = T.alloc_local((pieces, x_words), "uint32")
        values = T.alloc_local((pieces, vec) if is_pair else (1, 1), "float32")
        codes = T.alloc_local((out_words,), "uint32")
        part = T.alloc_var("uint32")
        amax = T.alloc_var("uint32")
        scale = T.alloc_local((2,), "uint32")
        factors = T.alloc_local((pieces, sf_per_piece), "float32")
        shared = T.alloc_shared((_AMAX_WORDS + (num_warps * 4 * chunks if staged else 0),), "uint32")
        for i in T.unroll(pieces):
            col = (i * lanes + thread) * vec
            load_piece(x, words, i, row, col, col < hidden and row < num_tokens)
        for i in T.unroll(pieces):
            col = (i * lanes + thread) * vec
            if is_pair:
                load_factors(x_sf, factors, i, row, col, col < hidden and row < num_tokens)
        part = T.uint32(0)
        for i in T.unroll(pieces):
            col = (i * lanes + thread) * vec
            if is_pair:
                dequantize_piece(words, factors, values, i, col < hidden and row < num_tokens)
            if mode != PRECOMPUTED:
                take_amax(words, values, i, part)
        if mode == PRECOMPUTED:
            scale[1] = T.reinterpret(sf[row, 0] if from_words else T.float32(1) / sf[row, 0], "uint32")
        else:
            amax = T.reinterpret(amax_of(part), "uint32")
            amax = warp_max_u32(amax)
            if num_warps > 1:
                if thread % 32 == 0:
                    shared[warp] = amax
                T.sync_threads()
                amax = T.if_then_else(thread % 32 < num_warps, shared[thread % 32], T.uint32(0))
                amax = warp_max_u32(amax)
            if from_words and not round_sf:
                e2m1_scale_of_amax(T.reinterpret(amax, "int32"), T.address_of(scale[0]))
            else:
                scale_of(T.reinterpret(amax, "int32"), scale)
            if thread == 0:
                if in_bytes:
                    store_word(sf, T.if_then_else(row < num_tokens, scale[0] >> T.uint32(23), T.uint32(0)), row, 0)
                else:
                    sf[row, 0] = T.reinterpret(scale[0], "float32")
        if mode != SF_ONLY:
            for i in T.unroll(pieces):
                col = (i * lanes + thread) * vec
                encode_piece(words, values, codes, i, scale[1])
                if staged:
                    # Twelve bytes a thread and piece; gathered by the warp, they leave in sixteens.
                    for j in T.unroll(out_words):
                        place = (warp * pieces + i) * 32 + thread % 32
                        shared[_AMAX_WORDS + place * out_words + j] = codes[j]
                elif col < hidden and row < num_tokens:
                    store_codes(data, codes, row, col * BITS[fmt] // 8)
            if staged:
                T.sync_warp()
                four = T.alloc_local((4,), "uint32")
                chunks_of_piece = chunks // pieces
                for k in T.unroll(ceil_div(chunks, 32)):
                    chunk = k * 32 + thread % 32
                    first = (chunk // chunks_of_piece * lanes + warp * 32) * vec * BITS[fmt] // 8
                    byte = first + chunk % chunks_of_piece * 16
                    if chunk < chunks and byte < hidden * BITS[fmt] // 8 and row < num_tokens:
                        for j in T.vectorized(4):
                            four[j] = shared[_AMAX_WORDS + (warp * chunks + chunk) * 4 + j]
                        T.stg128(data[row, byte], four[0:4])

    @T.prim_func
    def per_token_cast(x: x_type, x_sf: x_sf_type, tensor_sf: tensor_sf_type, data: data_type, sf: sf_type) -> None:
        with T.Kernel(T.ceildiv(num_rows, tile_rows) * col_tiles, threads=threads) as block:
            if config.blocks_per_sm:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            if by_warp:
                cast_groups(x, x_sf, tensor_sf, data, sf, block)
            else:
                cast_row(x, x_sf, data, sf, block)

    return per_token_cast
