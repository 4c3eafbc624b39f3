"""per_token_cast: quantize each token by groups of channels, `data * sf` standing for x.

For each token and each group of num_per_channels channels (the last one of a row may be shorter), in float32:

    amax = max(max |x|, least amax);   sf = amax / largest;   data = round(x * (largest / amax))
    with round_sf:                     sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x (num_tokens, hidden), bfloat16 or float32, or itself a pair of e4m3 or e2m1 data and scale factors; data e4m3 or e2m1.
Two relatives share the kernel: one returns sf alone, the other takes sf as given.

A thread takes a piece of `vec` neighbouring channels, from each of `pieces` rows at once so that enough loads are in
flight. A group is owned by neighbouring lanes of one warp, which agree on amax by shuffles; no shared memory is needed:

              tile of lanes x vec channels                  e.g. bfloat16, groups of 128, vec 16:
            ┌───────────┬───────────┬─   ─┬────────┐
    rows ×  │ group     │ group     │  …  │        │         lane  0 … 7   8 … 15   16 … 23   24 … 31
    pieces  │ l0 … l7   │ l8 … l15  │     │        │         group    0        1         2         3
            └───────────┴───────────┴─   ─┴────────┘         one packed word of sf, put together by shuffles too

Where a group is a whole row and no power of two of lanes, a block takes the row, each thread `pieces` pieces of it.
"""

import struct
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import check_scales, empty_scales, scale_layout
from tk_quant.conversions import E2M1_FROM_BF16, e2m1_source

_GROUPS = (16, 32, 64, 128)
_PLAIN_DTYPES = (torch.bfloat16, torch.float32)
_FLOAT4_DTYPE = getattr(torch, "float4_e2m1fn_x2", None)
_PAIR_DTYPES = (torch.float8_e4m3fn, torch.int8) + ((_FLOAT4_DTYPE,) if _FLOAT4_DTYPE is not None else ())
_FORMAT_OF_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "e2m1",
}
_BITS = {"bf16": 16, "fp32": 32, "e4m3": 8, "e2m1": 4}

# format: (largest finite value, least amax)
_LIMITS = {"e4m3": (448.0, 1e-4), "e2m1": (6.0, 6 * 2.0**-126)}
_INFINITY_BITS = 0x7F800000

_CAST, _SF_ONLY, _PRECOMPUTED = "cast", "sf_only", "precomputed"


@dataclass(frozen=True, eq=False)
class PerTokenCastConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once."""
    pieces: int
    """Pieces of a thread: of as many rows, or of one row where a block takes a whole row."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other, each with rows of its own."""

    @staticmethod
    @cache
    def best(hidden: int, num_per_channels: int, x_bits: int, packed: bool, arch: Arch) -> "PerTokenCastConfig":
        """The configuration for a width, a group, the bits of an input element and packed scale factors or not."""
        # Untuned. 32 bytes of plain input a piece; a float32 group of 128 takes 64 where its four bytes of sf must meet
        # in one warp.
        vec = 8 if x_bits == 32 else 16
        if packed:
            vec = max(vec, min(num_per_channels, 128) // 8)
        vec = min(vec, num_per_channels)
        if not _fits_warp(num_per_channels, vec):
            num_lanes = hidden // vec
            pieces = max(2 if num_lanes >= 128 else 1, ceil_div(num_lanes, 1024))
            return PerTokenCastConfig(vec, pieces, align(ceil_div(num_lanes, pieces), 32), 1)
        pieces = 2 if vec * x_bits >= 256 else 4
        unit = _unit_lanes(hidden, num_per_channels, vec, packed)
        num_lanes = align(ceil_div(hidden, vec), unit)
        lanes = align(ceil_div(num_lanes, ceil_div(num_lanes, 256)), unit)
        whole_warps = 32 // gcd(lanes, 32)
        return PerTokenCastConfig(vec, pieces, lanes, align(max(128 // lanes, 1), whole_warps))


def _fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether a group is a power of two of lanes, at most a warp of them."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


def _unit_lanes(hidden: int, num_per_channels: int, vec: int, packed: bool) -> int:
    """Lanes that must lie in one warp: those of a group, or of the four groups that share a packed word."""
    return num_per_channels // vec * (4 if packed and hidden > num_per_channels else 1)


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _per_token_cast_kernel(
    x_fmt: str,
    x_block_size: tuple[int, int] | None,
    x_packed: bool,
    alignment: int,
    hidden: int,
    fmt: str,
    num_per_channels: int,
    mode: str,
    round_sf: bool,
    packed: bool,
    config: PerTokenCastConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    largest, least_amax = _LIMITS[fmt]
    is_pair = x_block_size is not None
    x_words = vec * _BITS[x_fmt] // 32
    x_per_byte = 2 if x_fmt == "e2m1" else 1
    x_element = {"bf16": "bfloat16", "fp32": "float32", "e4m3": "float8_e4m3fn", "e2m1": "int8"}[x_fmt]
    x_elements = vec // x_per_byte
    load_bytes = min(alignment, 4 * x_words)
    out_words = vec * _BITS[fmt] // 32
    out_per_byte = 2 if fmt == "e2m1" else 1
    # With a power of two for a factor, scaling bfloat16 is exact in bfloat16, so two elements can go at once.
    in_bf16 = x_fmt == "bf16" and fmt == "e2m1" and round_sf and mode == _CAST and not arch.has_fp4_convert

    num_groups = ceil_div(hidden, num_per_channels)
    by_warp = _fits_warp(num_per_channels, vec)
    group_lanes = num_per_channels // vec
    share_word = packed and num_groups > 1
    if by_warp:
        unit_lanes = _unit_lanes(hidden, num_per_channels, vec, packed)
        assert unit_lanes <= 32
        assert lanes % unit_lanes == 0
        col_tiles = ceil_div(align(ceil_div(hidden, vec), unit_lanes), lanes)
        threads = align(lanes * config.rows, 32)
        tile_rows = config.rows * pieces
    else:
        assert lanes % 32 == 0
        assert lanes * pieces * vec >= hidden
        threads = lanes
        tile_rows = col_tiles = 1
    num_warps = threads // 32

    num_tokens = T.dynamic("num_tokens")
    x_stride = T.dynamic("x_stride")
    sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    x_type = T.StridedTensor((num_tokens, hidden // x_per_byte), (x_stride, 1), x_element)
    sf_shape = (num_tokens, ceil_div(num_groups, 4) if packed else num_groups)
    sf_dtype = "int32" if packed else "float32"
    sf_type = T.StridedTensor(sf_shape, (sf_row_stride, sf_col_stride), sf_dtype)
    # Where a variant has no x_sf or no out, the caller passes sf once more.
    x_sf_type = out_type = T.StridedTensor(sf_shape, (sf_row_stride, sf_col_stride), sf_dtype)
    if is_pair:
        x_sf_rows, x_sf_row_stride, x_sf_col_stride = map(
            T.dynamic, ("x_sf_rows", "x_sf_row_stride", "x_sf_col_stride")
        )
        x_sf_cols = ceil_div(hidden, x_block_size[1])
        x_sf_type = T.StridedTensor(
            (x_sf_rows, ceil_div(x_sf_cols, 4) if x_packed else x_sf_cols),
            (x_sf_row_stride, x_sf_col_stride),
            "int32" if x_packed else "float32",
        )
        # One scale factor for a piece, or one for each of its elements where blocks are narrower or odd.
        x_sf_per_piece = 1 if x_block_size[1] % vec == 0 or x_block_size[1] >= hidden else vec
    if mode != _SF_ONLY:
        out_type = T.Tensor((num_tokens, hidden // out_per_byte), "float8_e4m3fn" if fmt == "e4m3" else "int8")

    @T.macro
    def load_piece(x: T.Buffer, words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        x_col = col // x_per_byte
        per_word = x_elements // x_words
        if load_bytes == 16:
            for j in T.unroll(x_words // 4):
                words[piece, 4 * j : 4 * j + 4] = T.ldg128(x[row, x_col + 4 * j * per_word], pred=valid)
        elif load_bytes == 8:
            for j in T.unroll(x_words // 2):
                words[piece, 2 * j : 2 * j + 2] = T.ldg64(x[row, x_col + 2 * j * per_word], pred=valid)
        elif load_bytes == 4:
            for j in T.unroll(x_words):
                words[piece, j] = T.ldg32(x[row, x_col + j * per_word], pred=valid)
        else:
            elements = T.view(words, (pieces, x_elements), x_element)
            for j in T.unroll(x_words):
                words[piece, j] = T.uint32(0)
            if valid:
                for j in T.unroll(x_elements):
                    elements[piece, j] = x[row, x_col + j]

    @T.macro
    def dequantize_piece(
        words: T.Buffer, x_sf: T.Buffer, values: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool
    ) -> None:
        if x_fmt == "e4m3":
            codes = T.view(words, (pieces, vec), "float8_e4m3fn")
            for j in T.vectorized(vec):
                values[piece, j] = T.cast(codes[piece, j], "float32")
        else:
            for j in T.unroll(vec):
                # The three magnitude bits, on the border of exponent and mantissa, are worth 2**-126 of the value.
                code = words[piece, j // 8] << T.uint32(28 - 4 * (j % 8))
                bits = (code & T.uint32(0x80000000)) | ((code >> T.uint32(6)) & T.uint32(0x01C00000))
                values[piece, j] = T.reinterpret(bits, "float32") * T.float32(2.0**126)
        sf = T.alloc_local((x_sf_per_piece,), "float32")
        for j in T.unroll(x_sf_per_piece):
            sf_row, sf_col = row // x_block_size[0], (col + j) // x_block_size[1]
            if x_packed:
                word = T.if_then_else(valid, x_sf[sf_row, sf_col // 4], 0)
                code = (word >> (sf_col % 4 * 8)) & 0xFF
                bits = T.if_then_else(code == 0, 0x00400000, T.if_then_else(code == 255, 0x7FC00000, code << 23))
                sf[j] = T.reinterpret(bits, "float32")
            else:
                sf[j] = T.if_then_else(valid, x_sf[sf_row, sf_col], T.float32(0))
        for j in T.unroll(vec):
            values[piece, j] = values[piece, j] * sf[j % x_sf_per_piece]

    @T.macro
    def piece_amax(words: T.Buffer, values: T.Buffer, piece: int, amax: T.Ref) -> None:
        """The largest |x| of a piece, as the bits of a float32: so compared, NaN is above infinity above the rest."""
        if x_fmt == "bf16":
            pair = T.alloc_var("uint32")
            pair = T.uint32(0)
            for j in T.unroll(x_words):
                pair = T.call_extern("uint32", "__vmaxu2", pair, words[piece, j] & T.uint32(0x7FFF7FFF))
            amax = T.max(amax, T.reinterpret(T.max(pair << T.uint32(16), pair & T.uint32(0xFFFF0000)), "int32"))
        else:
            for j in T.unroll(vec):
                bits = T.reinterpret(values[piece, j], "int32") if is_pair else T.reinterpret(words[piece, j], "int32")
                amax = T.max(amax, bits & 0x7FFFFFFF)

    @T.macro
    def scale_of(amax: T.int32, scale: T.Buffer) -> None:
        """From the bits of amax to those of sf, scale[0], and of what x is multiplied by, scale[1]."""
        amax_value = T.reinterpret(amax, "float32")
        if round_sf:
            quotient = T.alloc_var("uint32")
            quotient = T.reinterpret(amax_value / T.float32(largest), "uint32")
            power = (quotient + T.uint32(0x007FFFFF)) & T.uint32(_INFINITY_BITS)
            # The exponent fields of 2**k and 2**-k sum up to 254. The reciprocal of infinity is 0, that of NaN is NaN.
            scale[0] = T.if_then_else(amax < _INFINITY_BITS, power, quotient)
            scale[1] = T.if_then_else(
                amax < _INFINITY_BITS,
                T.uint32(0x7F000000) - power,
                T.if_then_else(amax == _INFINITY_BITS, T.uint32(0), quotient),
            )
        else:
            scale[0] = T.reinterpret(amax_value / T.float32(largest), "uint32")
            scale[1] = T.reinterpret(T.float32(largest) / amax_value, "uint32")

    @T.macro
    def store_piece(
        words: T.Buffer,
        values: T.Buffer,
        out: T.Buffer,
        piece: int,
        row: T.int32,
        col: T.int32,
        factor: T.uint32,
        valid: T.bool,
    ) -> None:
        codes = T.alloc_local((out_words,), "uint32")
        if in_bf16:
            twice = T.alloc_var("uint32")
            twice = factor & T.uint32(0xFFFF0000)
            twice = twice | (twice >> T.uint32(16))
            for j in T.unroll(out_words):
                codes[j] = T.call_extern(
                    "uint32", "tk_e2m1x8_bf16", *(words[piece, 4 * j + k] for k in range(4)), twice
                )
        else:
            scaled = T.alloc_local((vec,), "float32")
            for j in T.unroll(vec):
                if is_pair:
                    scaled[j] = values[piece, j] * T.reinterpret(factor, "float32")
                elif x_fmt == "fp32":
                    scaled[j] = T.reinterpret(words[piece, j], "float32") * T.reinterpret(factor, "float32")
                else:
                    half = (
                        words[piece, j // 2] << T.uint32(16)
                        if j % 2 == 0
                        else words[piece, j // 2] & T.uint32(0xFFFF0000)
                    )
                    scaled[j] = T.reinterpret(half, "float32") * T.reinterpret(factor, "float32")
            if fmt == "e4m3":
                bytes_ = T.view(codes, (vec,), "float8_e4m3fn")
                for j in T.vectorized(vec):
                    bytes_[j] = T.cast(scaled[j], "float8_e4m3fn")
            else:
                for j in T.unroll(out_words):
                    codes[j] = T.call_extern("uint32", "tk_e2m1x8", *(scaled[8 * j + k] for k in range(8)))
        out_col = col // out_per_byte
        if valid:
            if out_words == 1:
                T.stg32(out[row, out_col], codes[0])
            elif out_words == 2:
                T.stg64(out[row, out_col], codes[0:2])
            else:
                for j in T.unroll(out_words // 4):
                    T.stg128(out[row, out_col + 16 * j], codes[4 * j : 4 * j + 4])

    @T.macro
    def store_sf(sf: T.Buffer, value: T.uint32, row: T.int32, col: T.int32, lane: T.int32, valid: T.bool) -> None:
        if share_word:
            word = T.alloc_var("uint32")
            word = T.if_then_else(valid, value >> T.uint32(23), T.uint32(0))
            word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
            word = word | T.shfl_xor(word, group_lanes)
            word = word | T.shfl_xor(word, 2 * group_lanes)
            if valid and lane % (4 * group_lanes) == 0:
                sf[row, col // (4 * num_per_channels)] = T.reinterpret(word, "int32")
        elif valid and lane % group_lanes == 0:
            if packed:
                sf[row, 0] = T.reinterpret(value >> T.uint32(23), "int32")
            else:
                sf[row, col // num_per_channels] = T.reinterpret(value, "float32")

    @T.prim_func
    def per_token_cast(x: x_type, x_sf: x_sf_type, out: out_type, sf: sf_type) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=threads) as block:
            if in_bf16:
                T.import_source(E2M1_FROM_BF16)
            elif fmt == "e2m1" and mode != _SF_ONLY:
                T.import_source(e2m1_source(arch))
            thread = T.get_thread_binding()
            lane = thread % lanes
            words = T.alloc_local((pieces, x_words), "uint32")
            values = T.alloc_local((pieces, vec) if is_pair else (1, 1), "float32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "uint32")

            if by_warp:
                first_row = (block // col_tiles) * tile_rows + thread // lanes * pieces
                col = ((block % col_tiles) * lanes + lane) * vec
                inside = col < hidden and thread < lanes * config.rows
                for i in T.unroll(pieces):
                    load_piece(x, words, i, first_row + i, col, inside and first_row + i < num_tokens)
                for i in T.unroll(pieces):
                    row = first_row + i
                    valid = inside and row < num_tokens
                    if is_pair:
                        dequantize_piece(words, x_sf, values, i, row, col, valid)
                    if mode == _PRECOMPUTED:
                        given = T.if_then_else(valid, sf[row, col // num_per_channels], T.float32(1))
                        scale[1] = T.reinterpret(T.float32(1) / given, "uint32")
                    else:
                        amax = _float_bits(least_amax)
                        piece_amax(words, values, i, amax)
                        for j in T.unroll(group_lanes.bit_length() - 1):
                            amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                        scale_of(amax, scale)
                        store_sf(sf, scale[0], row, col, lane, valid)
                    if mode != _SF_ONLY:
                        store_piece(words, values, out, i, row, col, scale[1], valid)
            else:
                amax = _float_bits(least_amax)
                for i in T.unroll(pieces):
                    load_piece(x, words, i, block, (i * lanes + lane) * vec, (i * lanes + lane) * vec < hidden)
                for i in T.unroll(pieces):
                    col = (i * lanes + lane) * vec
                    if is_pair:
                        dequantize_piece(words, x_sf, values, i, block, col, col < hidden)
                    if mode != _PRECOMPUTED:
                        piece_amax(words, values, i, amax)
                if mode == _PRECOMPUTED:
                    scale[1] = T.reinterpret(T.float32(1) / sf[block, 0], "uint32")
                else:
                    for j in T.unroll(5):
                        amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                    if num_warps > 1:
                        warp_amax = T.alloc_shared((32,), "int32")
                        if thread % 32 == 0:
                            warp_amax[thread // 32] = amax
                        T.sync_threads()
                        amax = T.if_then_else(thread % 32 < num_warps, warp_amax[thread % 32], 0)
                        for j in T.unroll(5):
                            amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                    scale_of(amax, scale)
                    if thread == 0:
                        if packed:
                            sf[block, 0] = T.reinterpret(scale[0] >> T.uint32(23), "int32")
                        else:
                            sf[block, 0] = T.reinterpret(scale[0], "float32")
                if mode != _SF_ONLY:
                    for i in T.unroll(pieces):
                        col = (i * lanes + lane) * vec
                        store_piece(words, values, out, i, block, col, scale[1], col < hidden)

    return per_token_cast


def _launch(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    data: torch.Tensor | None,
    sf: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    mode: str,
    round_sf: bool,
) -> None:
    if sf.numel() == 0:
        return
    arch = get_arch(x.device)
    x_fmt = _FORMAT_OF_DTYPE[x.dtype]
    hidden = x.shape[1] * 2 if x_fmt == "e2m1" else x.shape[1]
    packed = sf.dtype is torch.int32
    config = PerTokenCastConfig.best(hidden, num_per_channels, _BITS[x_fmt], packed, arch)
    _per_token_cast_kernel(
        x_fmt,
        None if x_sf is None else (x_block_tokens, x_block_channels),
        x_sf is not None and x_sf.dtype is torch.int32,
        check.row_alignment(x),
        hidden,
        fmt,
        num_per_channels,
        mode,
        round_sf,
        packed,
        config,
        arch,
    )(x, sf if x_sf is None else x_sf, sf if data is None else data, sf)


def _input(
    x: torch.Tensor, x_sf: torch.Tensor | None, x_block_tokens: int, x_block_channels: int
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], tuple[int, int] | None]:
    """What reference functions take for x and x_block_size, of what the operators take."""
    return (x, None) if x_sf is None else ((x, x_sf), (x_block_tokens, x_block_channels))


def _reference(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    data: torch.Tensor,
    sf: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    round_sf: bool,
) -> None:
    from tk_quant.reference.per_token_cast import per_token_cast

    packed = sf.dtype is torch.int32
    values, block_size = _input(x, x_sf, x_block_tokens, x_block_channels)
    new_data, new_sf = per_token_cast(values, fmt, num_per_channels, block_size, packed, round_sf, packed)
    data.copy_(new_data)
    sf.copy_(new_sf)


@op("tk_quant::per_token_cast_out", mutates=("data", "sf"), reference=_reference)
def _per_token_cast_out(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    data: torch.Tensor,
    sf: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    round_sf: bool,
) -> None:
    _launch(x, x_sf, data, sf, fmt, num_per_channels, x_block_tokens, x_block_channels, _CAST, round_sf)


def _sf_only_reference(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    sf: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    round_sf: bool,
) -> None:
    from tk_quant.reference.per_token_cast import per_token_cast_with_sf_only

    packed = sf.dtype is torch.int32
    values, block_size = _input(x, x_sf, x_block_tokens, x_block_channels)
    sf.copy_(per_token_cast_with_sf_only(values, fmt, num_per_channels, block_size, packed, round_sf, packed))


@op("tk_quant::per_token_cast_with_sf_only_out", mutates=("sf",), reference=_sf_only_reference)
def _per_token_cast_with_sf_only_out(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    sf: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    round_sf: bool,
) -> None:
    _launch(x, x_sf, None, sf, fmt, num_per_channels, x_block_tokens, x_block_channels, _SF_ONLY, round_sf)


def _precomputed_sf_reference(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    sf: torch.Tensor,
    data: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
) -> None:
    from tk_quant.reference.per_token_cast import per_token_cast_with_precomputed_sf

    values, block_size = _input(x, x_sf, x_block_tokens, x_block_channels)
    data.copy_(per_token_cast_with_precomputed_sf(values, fmt, num_per_channels, sf, block_size))


@op("tk_quant::per_token_cast_with_precomputed_sf_out", mutates=("data",), reference=_precomputed_sf_reference)
def _per_token_cast_with_precomputed_sf_out(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    sf: torch.Tensor,
    data: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
) -> None:
    _launch(x, x_sf, data, sf, fmt, num_per_channels, x_block_tokens, x_block_channels, _PRECOMPUTED, False)


def _check_input(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor | None, int, int, tuple[int, int]]:
    """Check what the three functions share: `(data of x, sf of x, num_tokens, hidden, x_block_size)`."""
    if isinstance(x, torch.Tensor):
        num_tokens, hidden = check.tensor("x", x, _PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
        check.require(x_block_size is None, "x_block_size", "None for a plain tensor x", x_block_size)
        x_sf, x_block_size = None, (0, 0)
    else:
        check.require_type(isinstance(x, (tuple, list)), "x", "a tensor or a pair (data, sf)", type(x).__name__)
        check.require(len(x) == 2, "x", "a pair (data, sf)", f"{len(x)} items")
        x, x_sf = x
        num_tokens, width = check.tensor("x[0]", x, _PAIR_DTYPES, ("num_tokens", "hidden"), layout="rows")
        if x.dtype is not torch.float8_e4m3fn and x.dtype is not torch.int8:
            x = x.view(torch.int8)
        hidden = width if x.dtype is torch.float8_e4m3fn else 2 * width
        check.require(x_block_size is not None, "x_block_size", "the block size of the pair x", x_block_size)
        x_block_size = tuple(x_block_size)
        check.require(len(x_block_size) == 2, "x_block_size", "two numbers", x_block_size)
        for size in x_block_size:
            check.integer("x_block_size", size)
            check.require(size > 0, "x_block_size", "two positive numbers", x_block_size)
        rows, cols = ceil_div(num_tokens, x_block_size[0]), ceil_div(hidden, x_block_size[1])
        check_scales("x[1]", x_sf, rows, cols, x.device)
    check.require(hidden > 0 and hidden % 64 == 0, "x", "a positive multiple of 64 channels", hidden)
    if fmt not in _LIMITS:
        check.one_of("fmt", fmt, tuple(_LIMITS))
    if num_per_channels not in _GROUPS:
        check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden))
    return x, x_sf, num_tokens, hidden, x_block_size


def _empty_data(x: torch.Tensor, num_tokens: int, hidden: int, fmt: str) -> torch.Tensor:
    if fmt == "e4m3":
        return x.new_empty((num_tokens, hidden), dtype=torch.float8_e4m3fn)
    return x.new_empty((num_tokens, hidden // 2), dtype=torch.int8)


@replayable
def per_token_cast(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each token by groups of channels; a quantized input is dequantized on the way, in the same pass.

    For each token and group, every operation in float32 to nearest with ties to even, max and least amax being 448 and
    1e-4 for e4m3, 6 and 6 * 2**-126 for e2m1:

        amax = max(max |x|, least amax);  sf = amax / max;  data = round(x * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(x / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. The
    formulas and names are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: (num_tokens, hidden) bfloat16 or float32, hidden a multiple of 64, rows may be strided; or a pair
            `(data, sf)`: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), with sf of blocks `x_block_size` in any layout of tk_core.scales. The pair's value is
            data * sf, rounded to float32.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or hidden. The last group of a row may be shorter.
        x_block_size: (tokens, channels) of a block of the pair x; None for a plain x.
        use_tma_aligned_col_major_sf: sf with strides (1, num_tokens rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs the other two flags.

    Returns:
        `(data, sf)`: data float8_e4m3fn (num_tokens, hidden), or int8 (num_tokens, hidden / 2) with the even channel in
        the low nibble; sf float32 (num_tokens, ceil(hidden / num_per_channels)), or packed int32 with a quarter of the
        columns.

    Raises:
        TypeError: x or its sf is no tensor, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    x, x_sf, num_tokens, hidden, x_block_size = _check_input(x, fmt, num_per_channels, x_block_size)
    data = _empty_data(x, num_tokens, hidden, fmt)
    sf = empty_scales(x, num_tokens, ceil_div(hidden, num_per_channels), layout)
    _per_token_cast_out(x, x_sf, data, sf, fmt, num_per_channels, *x_block_size, round_sf)
    return data, sf


@replayable
def per_token_cast_with_sf_only(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """The sf that `per_token_cast` would return, without the data.

    Args, errors and layouts: see `per_token_cast`.

    Returns:
        sf, float32 (num_tokens, ceil(hidden / num_per_channels)), or packed int32 with a quarter of the columns.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    x, x_sf, num_tokens, hidden, x_block_size = _check_input(x, fmt, num_per_channels, x_block_size)
    sf = empty_scales(x, num_tokens, ceil_div(hidden, num_per_channels), layout)
    _per_token_cast_with_sf_only_out(x, x_sf, sf, fmt, num_per_channels, *x_block_size, round_sf)
    return sf


@replayable
def per_token_cast_with_precomputed_sf(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """Quantize with scale factors that are there already: data = round(x * (1 / sf)), both operations in float32.

    Args:
        x, fmt, num_per_channels, x_block_size: see `per_token_cast`.
        sf: float32 (num_tokens, ceil(hidden / num_per_channels)), contiguous; another layout is not supported.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: must be False, as they would describe another layout of sf.
        round_sf: Either: 1 / sf is exact anyway where sf is a power of two.

    Returns:
        data, float8_e4m3fn (num_tokens, hidden), or int8 (num_tokens, hidden / 2).

    Raises:
        TypeError: x or sf is no tensor, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        name = "use_tma_aligned_col_major_sf" if use_tma_aligned_col_major_sf else "use_packed_ue8m0"
        check.require(False, name, "False, for a precomputed sf is row-major float32", True)
    x, x_sf, num_tokens, hidden, x_block_size = _check_input(x, fmt, num_per_channels, x_block_size)
    num_groups = ceil_div(hidden, num_per_channels)
    check.tensor("sf", sf, (torch.float32,), (num_tokens, num_groups), device=x.device)
    data = _empty_data(x, num_tokens, hidden, fmt)
    _per_token_cast_with_precomputed_sf_out(x, x_sf, sf, data, fmt, num_per_channels, *x_block_size)
    return data
