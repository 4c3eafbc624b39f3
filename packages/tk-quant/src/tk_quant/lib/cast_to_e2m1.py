"""The kernel of per_token_cast to e2m1 by groups of 16 to 128 channels, with or without data.

Thread by thread: at the tile level the casts of bfloat16 take 5 to 22 % longer, that of e4m3 pairs 36 % (H200). A
thread takes a piece of `vec` neighbouring channels, from each of `pieces` rows at once so that enough loads are in
flight. A group is owned by neighbouring threads of one warp, which agree on amax by shuffles:

              tile of lanes x vec channels                  e.g. bfloat16, groups of 32, 16 channels a thread:
            ┌───────────┬───────────┬─   ─┬────────┐
    rows ×  │ group     │ group     │  …  │        │         thread  0, 1   2, 3   4, 5   6, 7   8, 9  …
    pieces  │ l0, l1    │ l2, l3    │     │        │         group    0      1      2      3      4    …
            └───────────┴───────────┴─   ─┴────────┘         one word of four sf, put together by shuffles too
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.fp8 import decode_e4m3x4_f16
from tk_quant.device.magnitude import larger_magnitude_f16x2
from tk_quant.device.scaled_fp4 import e2m1x8_of_e4m3
from tk_quant.lib.cast_formats import ELEMENTS, FORMATS, CastInput, CastScales
from tk_quant.lib.quantize import load_codes_macro, load_macro, store_codes_macro

_WARP = 32
_VEC_OF_CODES = 32
_BYTES = (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)


@dataclass(frozen=True)
class PieceConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once."""
    pieces: int
    """Pieces of a thread, each of another row."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other."""
    unit: int
    """Lanes that lie in one warp: those of a group, or of the four groups that share a word of sf."""
    blocks_per_sm: int = 0
    """Blocks that registers must allow on an SM; 0 leaves it to the compiler."""
    streaming: bool = False
    """Whether caches are told that x is read once."""
    apart: int = 1
    """How far the rows of a thread are from each other."""

    @staticmethod
    @cache
    def best(
        hidden: int, group: int, x_bits: int, scales: CastScales, by_code: bool, with_data: bool, arch: Arch
    ) -> "PieceConfig":
        """The configuration for a width, a group, the bits of an element of x, and what is made of it."""
        # 32 bytes of plain input a piece; a float32 group of 128 takes 64 where its four bytes of sf must meet in one
        # warp.
        vec = 8 if x_bits == 32 else 16
        if scales.in_bytes:
            vec = max(vec, group // 8)
        if by_code:
            vec = _VEC_OF_CODES
        vec = min(vec, group)
        pieces = 2 if vec * x_bits >= 256 and not by_code else 4
        unit = group // vec * (4 if scales.in_bytes and hidden > group else 1)
        num_lanes = align(ceil_div(hidden, vec), unit)
        lanes = align(ceil_div(num_lanes, ceil_div(num_lanes, 256)), unit)
        rows = align(max(128 // lanes, 1), _WARP // gcd(lanes, _WARP))
        streaming, of_bf16 = x_bits in (8, 16), x_bits == 16 and with_data
        if by_code or (of_bf16 and scales.layout in _BYTES):
            # Down a column the words of sf are neighbours, so a block's rows fill whole sectors of them; the words of
            # swizzled rows 32 apart are, so a thread stores four of them at once.
            lanes, threads = max(unit, 8), 64 if by_code else 128
            if of_bf16 and scales.layout is ScaleLayout.SWIZZLED:
                return PieceConfig(vec, 4, lanes, threads // lanes, unit, 0, streaming, apart=32)
            return PieceConfig(vec, pieces, lanes, threads // lanes, unit, 0, streaming)
        # Four times as much is read as written: with few registers more reads are in flight.
        few_registers = of_bf16 and (scales.round_sf or not arch.has_fp4_convert)
        blocks_per_sm = max(1344 // (lanes * rows), 1) if few_registers else 0
        return PieceConfig(vec, pieces, lanes, rows, unit, blocks_per_sm, streaming)


def casts_codes(source: CastInput, hidden: int, scales: CastScales, with_data: bool, arch: Arch) -> bool:
    """Whether x is powers of two times e4m3 codes, so that the codes are cast and the scale takes in the power."""
    if source.dtype is not torch.float8_e4m3fn or source.layout not in _BYTES:
        return False
    one_sf_a_piece = source.block_size[1] % _VEC_OF_CODES == 0 or source.block_size[1] >= hidden
    return one_sf_a_piece and with_data and scales.round_sf and not arch.has_fp4_convert


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them, and there is no shared
# memory.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True})
def cast_to_e2m1_kernel(
    source: CastInput,
    hidden: int,
    group: int,
    scales: CastScales,
    with_data: bool,
    by_code: bool,
    config: PieceConfig,
    arch: Arch,
) -> Any:
    """Build `per_token_cast(x, x_sf, tensor_sf, data, sf)`, None standing for what there is none of.

    `by_code` is what `casts_codes` says.
    """
    import tilelang.language as T

    from tk_quant.lib import e2m1_pieces as p
    from tk_quant.lib.cast_tiles import input_scales_type, input_type
    from tk_quant.lib.scales_io import scale_rows, scales_type

    vec, pieces, lanes, group_lanes = config.vec, config.pieces, config.lanes, group // config.vec
    assert config.unit <= _WARP
    assert lanes % config.unit == 0
    assert config.apart == 1 or (config.apart == 32 and pieces == 4 and 32 % config.rows == 0)
    col_tiles = ceil_div(align(ceil_div(hidden, vec), config.unit), lanes)
    x_words, num_groups = vec * source.bits // 32, ceil_div(hidden, group)
    # One scale factor for a piece, or one for each of its elements where blocks are narrower or odd.
    one_factor = not source.is_pair or source.block_size[1] % vec == 0 or source.block_size[1] >= hidden
    if source.is_pair:
        element, alignment = ELEMENTS[FORMATS[source.dtype]], min(source.alignment, 16)
        load = load_codes_macro(element, pieces, 4 * x_words, alignment, config.streaming)
    else:
        load = load_macro(x_words, 4 // source.dtype.itemsize, source.alignment, config.streaming)
    store_codes = store_codes_macro(vec // 8)
    # Codes straight from the words of x, by fewer instructions than from scaled float32.
    of_words = source.dtype is torch.bfloat16 and with_data and not arch.has_fp4_convert
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def per_token_cast(
        x: input_type(source, num_tokens, hidden),
        x_sf: input_scales_type(source, hidden),
        tensor_sf: T.Tensor((1,), "float32"),
        data: T.Tensor((num_tokens, hidden // 2), "int8"),
        sf: scales_type(T.dynamic("sf_rows"), num_groups, scales.layout, scales.byte_dtype),
    ) -> None:
        num_rows = scale_rows(num_tokens, scales.layout)
        threads = align(lanes * config.rows, _WARP)
        with T.Kernel(T.ceildiv(num_rows, config.rows * pieces) * col_tiles, threads=threads) as block:
            if config.blocks_per_sm:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
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
            values = T.alloc_local((pieces, vec) if source.is_pair else (1, 1), "float32")
            codes = T.alloc_local((vec // 8,), "uint32")
            part = T.alloc_var("uint32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "uint32")
            factors = T.alloc_local((pieces, 1 if one_factor else vec), "float32")
            halves = T.alloc_local((vec // 2,), "uint32")
            four = T.alloc_local((pieces,), "uint32")
            for i in T.unroll(pieces):
                row = first_row + i * config.apart
                # Of a pair, where it is not valid, the words are unspecified.
                load(x, words, i, row, col * source.bits // 8 if source.is_pair else col, inside and row < num_tokens)
            for i in T.unroll(pieces):
                row = first_row + i * config.apart
                if source.is_pair:
                    p.load_factors(x_sf, factors, i, row, col, inside and row < num_tokens, source)
            for i in T.unroll(pieces):
                row = first_row + i * config.apart
                valid = inside and row < num_tokens
                part = T.uint32(0)
                if by_code:
                    for j in T.unroll(x_words):
                        decode_e4m3x4_f16(words[i, j], T.address_of(halves[2 * j]))
                    for j in T.unroll(vec // 2):
                        part = larger_magnitude_f16x2(part, halves[j])
                    larger_half = T.cast(T.max(part & T.uint32(0xFFFF), part >> T.uint32(16)), "uint16")
                    value = T.cast(T.reinterpret(larger_half, "float16"), "float32") * factors[i, 0]
                    part = T.if_then_else(valid, T.reinterpret(value, "uint32"), T.uint32(0))
                else:
                    if source.is_pair:
                        p.dequantize_piece(words, factors, values, i, valid, source)
                    p.take_amax(words, values, i, part, source)
                amax = p.amax_of(part, source, scales)
                for j in T.unroll(group_lanes.bit_length() - 1):
                    amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                p.scale_of_amax(amax, tensor_sf, scale, scales, of_words)
                has_sf = inside and row < num_rows
                if scales.in_bytes:
                    place = (row, col // group, lane, has_sf, valid)
                    p.store_bytes(sf, scale[0], four, i, *place, (group_lanes, config.unit), config.apart, scales)
                elif valid and lane % group_lanes == 0:
                    sf[row, col // group] = T.reinterpret(scale[0], "float32")
                if with_data:
                    if by_code:
                        factor = T.reinterpret(scale[1], "float32") * factors[i, 0]
                        for j in T.unroll(vec // 8):
                            codes[j] = e2m1x8_of_e4m3(
                                words[i, 2 * j], words[i, 2 * j + 1], T.address_of(halves[4 * j]), factor
                            )
                    elif of_words:
                        p.encode_words(words, codes, i, scale[1], scales)
                    else:
                        p.encode_values(words, values, codes, i, scale[1], source)
                    if valid:
                        store_codes(data, codes, row, col // 2)

    return per_token_cast
