"""swiglu_forward_and_per_token_cast: SwiGLU, a weight for each row, and the cast by groups of channels, in one pass.

For each position p and channel j, with l = x[p, j] and r = x[p, hidden + j], in float32, left to right:

    out = l / (1 + exp(-l)) * r * topk_weights.flat[pos_to_token_topk[p]]       (the weight where there are any)

and out is quantized by groups of num_per_channels channels as in per_token_cast; it is not rounded in between.
x (num_positions, 2 * hidden), bfloat16 or float32; data e4m3 (num_positions, hidden) or e2m1 (…, hidden / 2).

A thread takes `vec` neighbouring channels, of both halves of x, from each of `pieces` rows. A group is owned by
neighbouring lanes of one warp, which agree on amax by shuffles; four groups put a word of packed sf together likewise:

               left half of x                 right half                     hidden 2048, vec 16: 128 lanes
            ┌─────────┬─────────┬─  ─┐    ┌─────────┬─────────┬─  ─┐
    rows ×  │ l0 … l7 │ l8… l15 │ …  │    │ l0 … l7 │ l8… l15 │ …  │         lanes  0 … 7   8 … 15   16 … 23 …
    pieces  │         │         │    │    │         │         │    │         group     0       1         2
            └─────────┴─────────┴─  ─┘    └─────────┴─────────┴─  ─┘

Where a group is a whole row and no power of two of lanes, a block takes the row. Rows of padding are neither read nor
written. A thread waits for its row's index and then for 64 bytes of x, so as many threads as possible have to fit a
multiprocessor: registers are capped. silu.py keeps instructions below what the bandwidth leaves time for.
"""

import math
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.quantize import BITS, LIMITS, encode_macro, encode_source, scale_macro
from tk_quant.silu import CLAMP_SOURCE, SILU_SOURCE

_DTYPES = (torch.bfloat16, torch.float32)
_FORMATS = ("e4m3", "e2m1")
_GROUPS = (32, 128)
_LAYOUT_OF_DTYPE = {torch.int32: ScaleLayout.PACKED_UE8M0, torch.float8_e8m0fnu: ScaleLayout.SWIZZLED}
_ROWS_OF_SWIZZLED_TILE = 128
# Pieces of a row that a thread keeps in registers where a block takes a whole row; it computes more of them twice.
_MAX_KEPT_PIECES = 4
_LEAST_NORMAL = 2.0**-126
_LARGEST = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, eq=False)
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
    """Blocks that have to fit a multiprocessor: caps registers. So many share all rows where they count."""

    @staticmethod
    @cache
    def best(
        hidden: int, num_per_channels: int, x_bits: int, share_word: bool, counts: bool, arch: Arch
    ) -> "SwigluCastConfig":
        """The configuration for a width, a group, the bits of an input element, sf of bytes and counting or not."""
        # H200, 34816 x 2 * 2048: 84.5 us with 1536 threads (40 registers each), 88.5 with 1280, 100.4 with the 68
        # registers that nvcc takes by itself. vec 8 takes 105, two pieces of 80 registers 89.9; loading a row ahead in
        # a persistent grid is no better, 86.5. float32, at 52 registers, needs no cap; kept pieces need more.
        vec = 16
        num_lanes = hidden // vec
        if _fits_warp(num_per_channels, vec):
            unit = num_per_channels // vec * (4 if share_word else 1)
            num_lanes = align(num_lanes, unit)
            lanes = align(ceil_div(num_lanes, ceil_div(num_lanes, 256)), unit)
            pieces, rows = 1, align(max(128 // lanes, 1), 32 // gcd(lanes, 32))
        else:
            pieces, rows = ceil_div(num_lanes, 512), 1
            lanes = align(ceil_div(num_lanes, pieces), 32)
        threads = 512
        if x_bits == 16 and pieces == 1:
            threads = 1152 if counts else 1536 if rows == 1 else 1280
        return SwigluCastConfig(vec, pieces, lanes, rows, max(threads // (lanes * rows), 1))

    def num_tiles(self, num_rows: int, hidden: int, num_per_channels: int) -> int:
        """Pieces of the work, of which a block takes one or, where it counts, several."""
        if not _fits_warp(num_per_channels, self.vec):
            return num_rows
        return ceil_div(num_rows, self.rows * self.pieces) * ceil_div(hidden, self.lanes * self.vec)


def _fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether a group is a power of two of lanes, at most a warp of them."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _swiglu_cast_kernel(
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
    scale_of, encode = scale_macro(fmt, round_sf), encode_macro(fmt, vec)

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
    def silu_of_piece(
        gate: T.Buffer, values: T.Buffer, piece: int, function: str, clamp: T.float32, silu_of_clamp: T.float32
    ) -> None:
        for j in T.unroll(vec):
            values[piece, j] = T.call_extern("float32", function, element(gate, piece, j))
            if clamps:
                values[piece, j] = T.call_extern(
                    "float32", "tk_if_above", element(gate, piece, j), clamp, silu_of_clamp, values[piece, j]
                )

    @T.macro
    def activate(
        gate: T.Buffer,
        value: T.Buffer,
        values: T.Buffer,
        piece: int,
        weight: T.float32,
        clamp: T.float32,
        silu_of_clamp: T.float32,
        counting: bool,
        count: T.Buffer,
    ) -> None:
        """SwiGLU of a piece, its weight included; zeros, which count as nothing, for padding."""
        if counting:
            T.call_extern(
                "void",
                f"tk_count_clamped{'' if is_bf16 else '_float'}<{words_per_piece}>",
                *(T.address_of(words[piece, 0]) for words in (gate, value)),
                clamp,
                T.address_of(count[0]),
            )
        if not is_bf16:
            silu_of_piece(gate, values, piece, "tk_silu", clamp, silu_of_clamp)
        elif T.call_extern("bool", f"tk_are_near<{words_per_piece}>", T.address_of(gate[piece, 0])):
            silu_of_piece(gate, values, piece, "tk_silu_near", clamp, silu_of_clamp)
        else:
            silu_of_piece(gate, values, piece, "tk_silu", clamp, silu_of_clamp)
        for j in T.unroll(vec):
            right = T.alloc_var("float32")
            right = element(value, piece, j)
            if clamps:
                right = T.call_extern("float32", "tk_clamp", right, -clamp, clamp)
            values[piece, j] = values[piece, j] * right
            if has_weights:
                values[piece, j] = values[piece, j] * weight

    @T.macro
    def piece_amax(values: T.Buffer, piece: int, amax: T.Ref) -> None:
        """The largest magnitude of a piece and amax, as bits: so compared, NaN is above infinity above the rest."""
        largest = T.alloc_var("float32")
        largest = T.float32(0)
        for j in T.unroll(vec):
            largest = T.call_extern("float32", "tk_max_magnitude", largest, values[piece, j])
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
                if first and row < row_tiles * _ROWS_OF_SWIZZLED_TILE:
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
        num_tiles: T.int32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            T.import_source(SILU_SOURCE + (CLAMP_SOURCE if clamps else "") + encode_source(fmt, arch))
            thread = T.get_thread_binding()
            lane = thread % lanes
            gate = T.alloc_local((kept, words_per_piece), "uint32")
            value = T.alloc_local((kept, words_per_piece), "uint32")
            values = T.alloc_local((kept, vec), "float32")
            real = T.alloc_local((kept,), "bool")
            weight = T.alloc_local((kept,), "float32")
            count = T.alloc_local((3,), "int32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "uint32")
            silu_of_clamp = T.alloc_var("float32")
            if clamps:
                silu_of_clamp = T.call_extern("float32", "tk_silu", clamp)
            T.clear(count)
            for turn in T.serial(T.ceildiv(num_tiles - block, num_blocks) if counts else 1):
                tile = block + turn * num_blocks
                if by_warp:
                    first_row = (tile // col_tiles) * tile_rows + thread // lanes
                    col = ((tile % col_tiles) * lanes + lane) * vec
                    inside = col < hidden and thread < lanes * config.rows
                    for i in T.unroll(pieces):
                        row = first_row + i * config.rows
                        look_up(pos_to_token_topk, topk_weights, pos_to_expert, row, inside, i, real, weight)
                    for i in T.unroll(pieces):
                        load_piece(x, gate, value, i, first_row + i * config.rows, col, real[i])
                    for i in T.unroll(pieces):
                        row = first_row + i * config.rows
                        activate(gate, value, values, i, weight[i], clamp, silu_of_clamp, counts, count)
                        amax = T.reinterpret(least_amax, "int32")
                        piece_amax(values, i, amax)
                        for j in T.unroll(group_lanes.bit_length() - 1):
                            amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                        scale_of(amax, scale)
                        store_sf(sf, scale[0], row, col, lane, real[i])
                        store_piece(values, data, i, row, col, scale[1], real[i])
                else:
                    look_up(pos_to_token_topk, topk_weights, pos_to_expert, tile, True, 0, real, weight)
                    amax = T.reinterpret(least_amax, "int32")
                    if kept == pieces:
                        for i in T.unroll(pieces):
                            col = (i * lanes + lane) * vec
                            load_piece(x, gate, value, i, tile, col, real[0] and col < hidden)
                        for i in T.unroll(pieces):
                            activate(gate, value, values, i, weight[0], clamp, silu_of_clamp, counts, count)
                            piece_amax(values, i, amax)
                    else:
                        for i in T.serial(pieces):
                            col = (i * lanes + lane) * vec
                            load_piece(x, gate, value, 0, tile, col, real[0] and col < hidden)
                            activate(gate, value, values, 0, weight[0], clamp, silu_of_clamp, counts, count)
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
                        if counts:
                            T.sync_threads()
                    scale_of(amax, scale)
                    if real[0] and thread == 0:
                        sf[tile, 0] = T.reinterpret(scale[0], "float32")
                    if kept == pieces:
                        for i in T.unroll(pieces):
                            col = (i * lanes + lane) * vec
                            store_piece(values, data, i, tile, col, scale[1], real[0] and col < hidden)
                    else:
                        for i in T.serial(pieces):
                            col = (i * lanes + lane) * vec
                            load_piece(x, gate, value, 0, tile, col, real[0] and col < hidden)
                            activate(gate, value, values, 0, weight[0], clamp, silu_of_clamp, False, count)
                            store_piece(values, data, 0, tile, col, scale[1], real[0] and col < hidden)
            if counts:
                total = T.alloc_shared((3,), "int32")
                if thread < 3:
                    total[thread] = 0
                T.sync_threads()
                for i in T.unroll(3):
                    if count[i] > 0:
                        T.atomic_add(total[i], count[i])
                T.sync_threads()
                if thread < 3 and total[thread] > 0:
                    T.call_extern("void", "tk_add_int64", T.address_of(clamped_count[thread]), total[thread])

    return swiglu_forward_and_per_token_cast


def _reference(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    data: torch.Tensor,
    sf: torch.Tensor,
    clamped_count: torch.Tensor | None,
    fmt: str,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
) -> None:
    from tk_quant.reference.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast

    layout = _LAYOUT_OF_DTYPE.get(sf.dtype, ScaleLayout.ROW_MAJOR)
    packed = layout is ScaleLayout.PACKED_UE8M0
    swizzled = layout is ScaleLayout.SWIZZLED
    new_data, new_sf = swiglu_forward_and_per_token_cast(
        *(x, fmt, num_per_channels, pos_to_token_topk, topk_weights, pos_to_expert, packed, round_sf, packed),
        *(swiglu_clamp_value, clamped_count, sf_clamp_min, swizzled),
    )
    data.copy_(new_data)
    sf.copy_(new_sf)


@op("tk_quant::swiglu_forward_and_per_token_cast_out", mutates=("data", "sf", "clamped_count"), reference=_reference)
def _swiglu_forward_and_per_token_cast_out(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    data: torch.Tensor,
    sf: torch.Tensor,
    clamped_count: torch.Tensor | None,
    fmt: str,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
) -> None:
    num_positions, hidden = x.shape[0], x.shape[1] // 2
    if num_positions == 0:
        return
    arch = get_arch(x.device)
    layout = _LAYOUT_OF_DTYPE.get(sf.dtype, ScaleLayout.ROW_MAJOR)
    counts = clamped_count is not None
    config = SwigluCastConfig.best(
        hidden, num_per_channels, 8 * x.dtype.itemsize, layout in _LAYOUT_OF_DTYPE.values(), counts, arch
    )
    num_rows = align(num_positions, _ROWS_OF_SWIZZLED_TILE) if layout is ScaleLayout.SWIZZLED else num_positions
    num_tiles = config.num_tiles(num_rows, hidden, num_per_channels)
    num_blocks = num_tiles
    if counts:
        num_blocks = min(num_tiles, config.blocks_per_sm * get_num_sms(x.device))
    _swiglu_cast_kernel(
        *(x.dtype, check.row_alignment(x), hidden, fmt, num_per_channels, round_sf, layout),
        *(pos_to_token_topk is not None, pos_to_expert is not None),
        *(swiglu_clamp_value is not None, counts, config, arch),
    )(
        x,
        0 if pos_to_token_topk is None else pos_to_token_topk,
        0 if topk_weights is None else topk_weights,
        0 if pos_to_expert is None else pos_to_expert,
        0 if clamped_count is None else clamped_count,
        data,
        sf,
        0.0 if swiglu_clamp_value is None else float(swiglu_clamp_value),
        LIMITS[fmt][1] if sf_clamp_min is None else float(sf_clamp_min),
        num_tiles,
        num_blocks,
    )


def _check_maps(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
) -> None:
    num_positions, device = x.shape[0], x.device
    if pos_to_token_topk is not None:
        check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), (num_positions,), device=device)
        check.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", "num_topk"), device=device)
        if not torch.compiler.is_compiling() and env.debug() and num_positions and not x.is_meta:
            highest, size = int(pos_to_token_topk.max()), topk_weights.numel()
            check.require(highest < size, "pos_to_token_topk", f"indices into topk_weights, below {size}", highest)
    elif topk_weights is not None:
        check.require(False, "pos_to_token_topk", "a tensor beside topk_weights", None)
    if pos_to_expert is not None:
        check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), (num_positions,), device=device)


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    check.require_type(isinstance(value, int | float) and not isinstance(value, bool), name, "a number", value)
    check.require(least <= value <= most, name, f"a number from {least} to {most}", value)


@replayable
def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    use_swizzled_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of each row, times its weight where there are weights, quantized by groups of channels in the same pass.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right; max and least amax are 448 and 1e-4 for e4m3, 6 and 6 * 2**-126 for e2m1:

        out = l / (1 + exp(-l)) * r * weight;  amax = max(max |out|, least amax)
        sf = amax / max;  data = round(out * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(out / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. Names
    and formulas are those of DeepSeek's TileKernels 1.0.0; groups of 32, e2m1 and swizzled sf are not in it.

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, the gate l in the left half; hidden a multiple of 128, rows
            may be strided.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 32, 128 or hidden, for which 0 stands too.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32 (num_tokens, num_topk); with pos_to_token_topk only, and the other way round.
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. What data and sf of padding rows
            hold is unspecified (swizzled sf: 0), and x is not read there.
        use_tma_aligned_col_major_sf: sf with strides (1, num_positions rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs the other two flags.
        swiglu_clamp_value: c > 0: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        clamped_count: int64 (3,), changed in place: the numbers of l > c, r > c and r < -c in rows that are no padding
            are added. Needs swiglu_clamp_value.
        sf_clamp_min: The least amax instead of the format's; at least max * 2**-126.
        use_swizzled_sf: sf as Blackwell's block-scaled matrix products read it; needs round_sf.

    Returns:
        `(data, sf)`: data float8_e4m3fn (num_positions, hidden), or int8 (num_positions, hidden / 2) with the even
        channel in the low nibble; sf float32 (num_positions, hidden / num_per_channels), or packed int32 with a quarter
        of the columns, or swizzled float8_e8m0fnu (see tk_core.scales). Layouts other than row major are for groups of
        32 and 128.

    Raises:
        TypeError: A tensor or a number is none, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    check.require(round_sf or not use_swizzled_sf, "use_swizzled_sf", "False without round_sf", use_swizzled_sf)
    num_positions, width = check.tensor("x", x, _DTYPES, ("num_positions", "2 * hidden"), layout="rows")
    check.require(width > 0 and width % 256 == 0, "x", "a positive multiple of 256 columns", width)
    hidden = width // 2
    check.one_of("fmt", fmt, _FORMATS)
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden, 0))
    num_per_channels = num_per_channels or hidden
    if layout is not ScaleLayout.ROW_MAJOR and num_per_channels not in _GROUPS:
        check.require(False, "num_per_channels", f"32 or 128 for sf in layout {layout.name}", num_per_channels)
    _check_maps(x, pos_to_token_topk, topk_weights, pos_to_expert)
    if swiglu_clamp_value is not None:
        _check_number("swiglu_clamp_value", swiglu_clamp_value, _LEAST_NORMAL, math.inf)
    if clamped_count is not None:
        check.require(swiglu_clamp_value is not None, "swiglu_clamp_value", "a number beside clamped_count", None)
        check.tensor("clamped_count", clamped_count, (torch.int64,), (3,), device=x.device)
    if sf_clamp_min is not None:
        _check_number("sf_clamp_min", sf_clamp_min, LIMITS[fmt][0] * _LEAST_NORMAL, _LARGEST)
    data_dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.int8
    data = x.new_empty((num_positions, hidden * BITS[fmt] // 8), dtype=data_dtype)
    sf = empty_scales(x, num_positions, hidden // num_per_channels, layout)
    _swiglu_forward_and_per_token_cast_out(
        *(x, pos_to_token_topk, topk_weights, pos_to_expert, data, sf, clamped_count),
        *(fmt, num_per_channels, round_sf, swiglu_clamp_value, sf_clamp_min),
    )
    return data, sf
