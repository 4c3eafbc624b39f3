"""The kernel of swiglu_forward_and_per_token_cast; see there for the formulas and a picture."""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.memory import load_mostly_evict_first
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.swiglu import are_near, are_within_clamp, clamp_value, count_clamped, max_nan, silu
from tk_quant.lib.quantize import BITS, encode_macro, scale_macro

ROWS_OF_SWIZZLED_TILE = 128
# Pieces of a row that a thread keeps in registers where a block takes a whole row; it computes more of them twice.
_MAX_KEPT_PIECES = 4


@dataclass(frozen=True)
class SwigluCastConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once."""
    pieces: int
    """Pieces of a thread: of as many rows, or of one row where a block takes a whole row."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other, each with rows of its own."""
    blocks_per_sm: int
    """Blocks that have to fit a multiprocessor: caps registers."""

    @staticmethod
    @cache
    def best(
        hidden: int, num_per_channels: int, x_bits: int, share_word: bool, clamps: bool, arch: Arch
    ) -> "SwigluCastConfig":
        """The configuration for a width, a group, the bits of an input element, sf of bytes and a clamp or not."""
        # H200, 34816 x 2 * 2048: 84.5 us with 1536 threads (40 registers each), 88.5 with 1280, 100.4 with the 68
        # registers that nvcc takes by itself; vec 8 takes 105, two pieces 89.9, a row ahead in a persistent grid 86.5.
        # With a clamp 40 don't suffice; float32 takes 52. Of hidden 640, 40 lanes x 4 rows take 31.6 us, 8 x 16 30.9.
        vec = 16
        num_lanes = hidden // vec
        if _fits_warp(num_per_channels, vec):
            unit = num_per_channels // vec * (4 if share_word else 1)
            num_lanes = align(num_lanes, unit)
            lanes = align(ceil_div(num_lanes, ceil_div(num_lanes, 256)), unit)
            if lanes % 32 or lanes <= 64:
                lanes = gcd(num_lanes, 32)
            pieces, rows = 1, max(128 // lanes, 1)
        else:
            pieces, rows = ceil_div(num_lanes, 512), 1
            lanes = align(ceil_div(num_lanes, pieces), 32)
        threads = 512
        if x_bits == 16 and pieces == 1:
            threads = (1280 if rows == 1 else 1024) if clamps else 1536
        return SwigluCastConfig(vec, pieces, lanes, rows, max(threads // (lanes * rows), 1))

    def num_blocks(self, num_rows: int, hidden: int, num_per_channels: int) -> int:
        """Blocks that a launch takes."""
        if not _fits_warp(num_per_channels, self.vec):
            return num_rows
        return ceil_div(num_rows, self.rows * self.pieces) * ceil_div(hidden, self.lanes * self.vec)


def _fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether a group is a power of two of lanes, at most a warp of them."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def swiglu_cast_kernel(
    x_dtype: torch.dtype,
    alignment: int,
    hidden: int,
    fmt: str,
    num_per_channels: int,
    round_sf: bool,
    layout: ScaleLayout,
    has_weights: bool,
    has_experts: bool,
    clamps: bool,
    counts: bool,
    config: SwigluCastConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    is_bf16 = x_dtype is torch.bfloat16
    x_element = T.dtype(x_dtype)
    per_word = 4 // x_dtype.itemsize
    words_per_piece = vec // per_word
    load_bytes = min(alignment, 16)
    out_words = vec * BITS[fmt] // 32
    out_per_byte = 8 // BITS[fmt]
    scale_of = scale_macro(fmt, round_sf)
    # Scales are made from the amax of the group, so magnitudes are bounded unless that is not finite.
    encode = encode_macro(fmt, vec, are_bounded=True)

    num_groups = hidden // num_per_channels
    swizzled = layout is ScaleLayout.SWIZZLED
    share_word = swizzled or layout is ScaleLayout.PACKED_UE8M0
    by_warp = _fits_warp(num_per_channels, vec)
    group_lanes = num_per_channels // vec
    if by_warp:
        unit_lanes = group_lanes * (4 if share_word else 1)
        assert unit_lanes <= 32
        assert lanes % unit_lanes == 0
        col_tiles = ceil_div(hidden, lanes * vec)
        threads = align(lanes * config.rows, 32)
        tile_rows = config.rows * pieces
    else:
        assert lanes % 32 == 0
        assert lanes * pieces * vec >= hidden
        assert not share_word
        threads = lanes
        tile_rows = col_tiles = 1
    num_warps = threads // 32
    kept = pieces if by_warp or pieces <= _MAX_KEPT_PIECES else 1

    num_positions, x_stride = T.dynamic("num_positions"), T.dynamic("x_stride")
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    data_type = T.Tensor((num_positions, hidden // out_per_byte), "float8_e4m3fn" if fmt == "e4m3" else "int8")
    # Where a variant lacks an argument, the caller passes a 0, which costs the host less than a tensor.
    map_type, weights_type, experts_type, count_type = T.int32, T.int32, T.int32, T.int32
    if has_weights:
        map_type = T.Tensor((num_positions,), "int32")
        weights_type = T.Tensor((num_tokens, num_topk), "float32")
    if has_experts:
        experts_type = T.Tensor((num_positions,), "int32")
    if counts:
        count_type = T.Tensor((3,), "int64")
    if swizzled:
        row_tiles = T.dynamic("row_tiles")
        sf_type = T.Tensor((row_tiles, ceil_div(num_groups, 4), 32, 4, 4), "float8_e8m0fnu")
    else:
        sf_cols = ceil_div(num_groups, 4) if share_word else num_groups
        sf_dtype = "int32" if share_word else "float32"
        sf_type = T.StridedTensor((num_positions, sf_cols), (sf_row_stride, sf_col_stride), sf_dtype)

    @T.macro
    def load_half(x: T.Buffer, words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        if load_bytes == 16:
            for j in T.unroll(words_per_piece // 4):
                if kept == pieces:
                    both = T.address_of(words[piece, 4 * j]), T.address_of(x[row, col + 4 * j * per_word])
                    load_mostly_evict_first(*both, valid)
                else:
                    words[piece, 4 * j : 4 * j + 4] = T.ldg128(x[row, col + 4 * j * per_word], pred=valid)
        elif load_bytes == 8:
            for j in T.unroll(words_per_piece // 2):
                words[piece, 2 * j : 2 * j + 2] = T.ldg64(x[row, col + 2 * j * per_word], pred=valid)
        elif load_bytes == 4:
            for j in T.unroll(words_per_piece):
                words[piece, j] = T.ldg32(x[row, col + j * per_word], pred=valid)
        else:
            elements = T.view(words, (kept, vec), x_element)
            for j in T.unroll(words_per_piece):
                words[piece, j] = T.uint32(0)
            if valid:
                for j in T.unroll(vec):
                    elements[piece, j] = x[row, col + j]

    @T.macro
    def load_piece(
        x: T.Buffer, gate: T.Buffer, value: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool
    ) -> None:
        load_half(x, gate, piece, row, col, valid)
        load_half(x, value, piece, row, hidden + col, valid)

    def element(words: T.Buffer, piece: int, j: int) -> Any:
        """Element j of a piece as a float32."""
        if not is_bf16:
            return T.reinterpret(words[piece, j], "float32")
        word = words[piece, j // 2]
        return T.reinterpret(T.if_then_else(j % 2 == 0, word << T.uint32(16), word & T.uint32(0xFFFF0000)), "float32")

    @T.macro
    def look_up(
        pos_to_token_topk: T.Buffer,
        topk_weights: T.Buffer,
        pos_to_expert: T.Buffer,
        row: T.int32,
        inside: T.bool,
        piece: int,
        real: T.Buffer,
        weight: T.Buffer,
    ) -> None:
        """Whether the row of a piece is no padding, and its weight."""
        real[piece] = inside and row < num_positions
        if has_weights:
            index = T.alloc_var("int32")
            index = T.reinterpret(T.ldg32(pos_to_token_topk[row], pred=real[piece]), "int32")
            real[piece] = real[piece] and index >= 0
            real[piece] = real[piece] and T.cast(index, "int64") < T.cast(num_tokens, "int64") * num_topk
        if has_experts:
            real[piece] = real[piece] and T.reinterpret(T.ldg32(pos_to_expert[row], pred=real[piece]), "int32") >= 0
        if has_weights:
            weight[piece] = T.reinterpret(T.ldg32(topk_weights[0, index], pred=real[piece]), "float32")

    @T.macro
    def count_piece(gate: T.Buffer, value: T.Buffer, piece: int, clamp: T.float32, total: T.Buffer) -> None:
        count = T.alloc_local((3,), "int32")
        T.clear(count)
        if is_bf16:
            words = T.address_of(gate[piece, 0]), T.address_of(value[piece, 0])
            count_clamped(*words, words_per_piece, clamp, T.address_of(count[0]))
        else:
            for j in T.unroll(vec):
                count[0] = count[0] + T.cast(element(gate, piece, j) > clamp, "int32")
                count[1] = count[1] + T.cast(element(value, piece, j) > clamp, "int32")
                count[2] = count[2] + T.cast(element(value, piece, j) < -clamp, "int32")
        for i in T.unroll(3):
            T.atomic_add(total[i], count[i])

    @T.macro
    def silu_of_piece(gate: T.Buffer, values: T.Buffer, piece: int, near: bool) -> None:
        for j in T.unroll(vec):
            values[piece, j] = silu(element(gate, piece, j), near)

    @T.macro
    def silus_of_piece(gate: T.Buffer, values: T.Buffer, piece: int) -> None:
        if not is_bf16:
            silu_of_piece(gate, values, piece, False)
        elif are_near(T.address_of(gate[piece, 0]), words_per_piece):
            silu_of_piece(gate, values, piece, True)
        else:
            silu_of_piece(gate, values, piece, False)

    @T.macro
    def activate(
        gate: T.Buffer,
        value: T.Buffer,
        values: T.Buffer,
        piece: int,
        weight: T.float32,
        clamp: T.float32,
        counting: bool,
        total: T.Buffer,
    ) -> None:
        """SwiGLU of a piece, its weight included; zeros, which count as nothing, for padding."""
        within, silu_of_clamp = T.alloc_var("bool"), T.alloc_var("float32")
        silus_of_piece(gate, values, piece)
        if clamps:
            if is_bf16:
                words = T.address_of(gate[piece, 0]), T.address_of(value[piece, 0])
                within = are_within_clamp(*words, words_per_piece, clamp)
            else:
                largest = T.alloc_var("float32")
                largest = T.float32(0)
                for j in T.unroll(vec):
                    largest = T.max(T.max(largest, element(gate, piece, j)), T.abs(element(value, piece, j)))
                within = largest <= clamp
            if not within:
                if counting:
                    count_piece(gate, value, piece, clamp, total)
                silu_of_clamp = silu(clamp)
                for j in T.unroll(vec):
                    values[piece, j] = T.if_then_else(element(gate, piece, j) > clamp, silu_of_clamp, values[piece, j])
                    values[piece, j] = values[piece, j] * clamp_value(element(value, piece, j), -clamp, clamp)
            else:
                for j in T.unroll(vec):
                    values[piece, j] = values[piece, j] * element(value, piece, j)
        else:
            for j in T.unroll(vec):
                values[piece, j] = values[piece, j] * element(value, piece, j)
        if has_weights:
            for j in T.unroll(vec):
                values[piece, j] = values[piece, j] * weight

    @T.macro
    def piece_amax(values: T.Buffer, piece: int, amax: T.Ref) -> None:
        """The largest magnitude of a piece and amax, as bits: so compared, NaN is above infinity above the rest."""
        largest = T.alloc_var("float32")
        largest = T.float32(0)
        for j in T.unroll(vec):
            largest = max_nan(largest, T.abs(values[piece, j]))
        amax = T.max(amax, T.reinterpret(largest, "int32"))

    @T.macro
    def store_piece(
        values: T.Buffer, data: T.Buffer, piece: int, row: T.int32, col: T.int32, factor: T.uint32, valid: T.bool
    ) -> None:
        scaled = T.alloc_local((vec,), "float32")
        codes = T.alloc_local((out_words,), "uint32")
        for j in T.unroll(vec):
            scaled[j] = values[piece, j] * T.reinterpret(factor, "float32")
        encode(scaled, codes)
        if valid:
            if out_words == 1:
                T.stg32(data[row, col // out_per_byte], codes[0])
            elif out_words == 2:
                T.stg64(data[row, col // out_per_byte], codes[0:2])
            else:
                for j in T.unroll(out_words // 4):
                    T.stg128(data[row, col // out_per_byte + 16 * j], codes[4 * j : 4 * j + 4])

    @T.macro
    def store_sf(sf: T.Buffer, bits: T.uint32, row: T.int32, col: T.int32, lane: T.int32, valid: T.bool) -> None:
        if share_word:
            word = T.alloc_var("uint32")
            word = T.if_then_else(valid, bits >> T.uint32(23), T.uint32(0))
            word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
            word = word | T.shfl_xor(word, group_lanes)
            word = word | T.shfl_xor(word, 2 * group_lanes)
            first = lane % unit_lanes == 0 and col < hidden
            if swizzled:
                # Rows of padding, and those that fill the last tile, get zeros.
                if first and row < row_tiles * ROWS_OF_SWIZZLED_TILE:
                    T.stg32(sf[row // 128, col // (4 * num_per_channels), row % 32, row % 128 // 32, 0], word)
            elif first and valid:
                sf[row, col // (4 * num_per_channels)] = T.reinterpret(word, "int32")
        elif valid and lane % group_lanes == 0:
            sf[row, col // num_per_channels] = T.reinterpret(bits, "float32")

    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((num_positions, 2 * hidden), (x_stride, 1), x_element),
        pos_to_token_topk: map_type,
        topk_weights: weights_type,
        pos_to_expert: experts_type,
        clamped_count: count_type,
        data: data_type,
        sf: sf_type,
        clamp: T.float32,
        least_amax: T.float32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            # Narrow loads take more registers.
            T.annotate_min_blocks_per_sm(max(config.blocks_per_sm * (4 if load_bytes >= 8 else 3) // 4, 1))
            thread = T.get_thread_binding()
            lane = thread % lanes
            gate = T.alloc_local((kept, words_per_piece), "uint32")
            value = T.alloc_local((kept, words_per_piece), "uint32")
            values = T.alloc_local((kept, vec), "float32")
            real = T.alloc_local((kept,), "bool")
            weight = T.alloc_local((kept,), "float32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "uint32")
            total = T.alloc_shared((3,), "int32")
            if counts:
                if thread < 3:
                    total[thread] = 0
                T.sync_threads()
            if by_warp:
                # Variables: as parts of an address these would be divisions of 64 bits.
                first_row, col = T.alloc_var("int32"), T.alloc_var("int32")
                first_row = (block // col_tiles) * tile_rows + thread // lanes
                col = ((block % col_tiles) * lanes + lane) * vec
                inside = col < hidden and thread < lanes * config.rows
                for i in T.unroll(pieces):
                    row = first_row + i * config.rows
                    look_up(pos_to_token_topk, topk_weights, pos_to_expert, row, inside, i, real, weight)
                for i in T.unroll(pieces):
                    load_piece(x, gate, value, i, first_row + i * config.rows, col, real[i])
                for i in T.unroll(pieces):
                    row = first_row + i * config.rows
                    activate(gate, value, values, i, weight[i], clamp, counts, total)
                    amax = T.reinterpret(least_amax, "int32")
                    piece_amax(values, i, amax)
                    for j in T.unroll(group_lanes.bit_length() - 1):
                        amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                    scale_of(amax, scale)
                    store_sf(sf, scale[0], row, col, lane, real[i])
                    store_piece(values, data, i, row, col, scale[1], real[i])
            else:
                look_up(pos_to_token_topk, topk_weights, pos_to_expert, block, True, 0, real, weight)
                amax = T.reinterpret(least_amax, "int32")
                if kept == pieces:
                    for i in T.unroll(pieces):
                        col = (i * lanes + lane) * vec
                        load_piece(x, gate, value, i, block, col, real[0] and col < hidden)
                    for i in T.unroll(pieces):
                        activate(gate, value, values, i, weight[0], clamp, counts, total)
                        piece_amax(values, i, amax)
                else:
                    for i in T.serial(pieces):
                        col = (i * lanes + lane) * vec
                        load_piece(x, gate, value, 0, block, col, real[0] and col < hidden)
                        activate(gate, value, values, 0, weight[0], clamp, counts, total)
                        piece_amax(values, 0, amax)
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
                if real[0] and thread == 0:
                    sf[block, 0] = T.reinterpret(scale[0], "float32")
                if kept == pieces:
                    for i in T.unroll(pieces):
                        col = (i * lanes + lane) * vec
                        store_piece(values, data, i, block, col, scale[1], real[0] and col < hidden)
                else:
                    for i in T.serial(pieces):
                        col = (i * lanes + lane) * vec
                        load_piece(x, gate, value, 0, block, col, real[0] and col < hidden)
                        activate(gate, value, values, 0, weight[0], clamp, False, total)
                        store_piece(values, data, 0, block, col, scale[1], real[0] and col < hidden)
            if counts:
                T.sync_threads()
                if thread < 3 and total[thread] > 0:
                    T.atomic_add(clamped_count[thread], T.cast(total[thread], "int64"))

    return swiglu_forward_and_per_token_cast
