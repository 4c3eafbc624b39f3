"""The kernels of swiglu_forward_and_per_token_cast; see there for the formulas and a picture."""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.lib.cast_formats import CastInput, CastScales
from tk_quant.lib.quantize import scale_macro
from tk_quant.swiglu.swiglu_forward import Given

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
        if fits_warp(num_per_channels, vec):
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

    def min_blocks_per_sm(self, alignment: int) -> int:
        """`blocks_per_sm` for an alignment of x: narrow loads take more registers."""
        return max(self.blocks_per_sm * (4 if alignment >= 8 else 3) // 4, 1)

    def num_blocks(self, num_rows: int, hidden: int, num_per_channels: int) -> int:
        """Blocks that a launch takes."""
        if not fits_warp(num_per_channels, self.vec):
            return num_rows
        return ceil_div(num_rows, self.rows * self.pieces) * ceil_div(hidden, self.lanes * self.vec)


def fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether a group is a power of two of lanes, at most a warp of them."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


# H200, 34816 x 2 * 2048: 81.8 us for 1 x 128 where tile-level kernels take 86.5; docs/tuning/tile-level/swiglu.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def swiglu_group_cast_kernel(
    hidden: int,
    source: CastInput,
    fmt: str,
    num_per_channels: int,
    scales: CastScales,
    given: Given,
    config: SwigluCastConfig,
    arch: Arch,
) -> Any:
    """Groups that neighbouring lanes of a warp hold."""
    import tilelang.language as T

    from tk_quant.lib import swiglu_forward_and_per_token_cast_steps as steps
    from tk_quant.lib.scales_io import scales_type

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    words_per_piece = vec * source.dtype.itemsize // 4
    scale_of = scale_macro(fmt, scales.round_sf)
    group_lanes, num_groups = num_per_channels // vec, hidden // num_per_channels
    unit_lanes = group_lanes * (4 if scales.in_bytes else 1)
    assert unit_lanes <= 32
    assert lanes % unit_lanes == 0
    col_tiles, tile_rows = ceil_div(hidden, lanes * vec), config.rows * pieces

    num_positions, x_stride = T.dynamic("num_positions"), T.dynamic("x_stride")
    map_type, weights_type, experts_type, count_type, data_type = steps.argument_types(
        num_positions, hidden, fmt, given
    )
    sf_type = scales_type(num_positions, num_groups, scales.layout)

    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((num_positions, 2 * hidden), (x_stride, 1), source.dtype),
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
        with T.Kernel(num_blocks, threads=align(lanes * config.rows, 32)) as block:
            T.annotate_min_blocks_per_sm(config.min_blocks_per_sm(source.alignment))
            thread = T.get_thread_binding()
            lane = thread % lanes
            gate = T.alloc_local((pieces, words_per_piece), "uint32")
            value = T.alloc_local((pieces, words_per_piece), "uint32")
            values = T.alloc_local((pieces, vec), "float32")
            real = T.alloc_local((pieces,), "bool")
            weight = T.alloc_local((pieces,), "float32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "uint32")
            total = T.alloc_shared((3,), "int32")
            if given.count:
                steps.clear_counts(total, thread)
            # Variables: as parts of an address these would be divisions of 64 bits.
            first_row, col = T.alloc_var("int32"), T.alloc_var("int32")
            first_row = (block // col_tiles) * tile_rows + thread // lanes
            col = ((block % col_tiles) * lanes + lane) * vec
            inside = col < hidden and thread < lanes * config.rows
            for i in T.unroll(pieces):
                row = first_row + i * config.rows
                maps = pos_to_token_topk, topk_weights, pos_to_expert
                steps.look_up(*maps, num_positions, row, inside, i, real, weight, given)
            for i in T.unroll(pieces):
                steps.load_piece(x, gate, value, i, first_row + i * config.rows, col, real[i], source)
            for i in T.unroll(pieces):
                row = first_row + i * config.rows
                steps.activate(gate, value, values, i, weight[i], clamp, source, given)
                if given.count:
                    steps.count_clamped(gate, value, i, clamp, total, source)
                amax = T.reinterpret(least_amax, "int32")
                steps.piece_amax(values, i, amax)
                for j in T.unroll(group_lanes.bit_length() - 1):
                    amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                scale_of(amax, scale)
                shape = hidden, num_per_channels, group_lanes
                steps.store_sf(sf, scale[0], row, col, lane, real[i], *shape, scales.layout)
                steps.store_piece(values, data, i, row, col, scale[1], real[i], fmt)
            if given.count:
                steps.add_counts(total, clamped_count, thread)

    return swiglu_forward_and_per_token_cast


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def swiglu_row_cast_kernel(
    hidden: int, source: CastInput, fmt: str, round_sf: bool, given: Given, config: SwigluCastConfig, arch: Arch
) -> Any:
    """Groups that are whole rows, each of which a thread block takes; sf in float32."""
    import tilelang.language as T

    from tk_quant.lib import swiglu_forward_and_per_token_cast_steps as steps
    from tk_quant.lib.scales_io import scales_type

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    words_per_piece = vec * source.dtype.itemsize // 4
    scale_of = scale_macro(fmt, round_sf)
    assert lanes % 32 == 0
    assert lanes * pieces * vec >= hidden
    num_warps = lanes // 32
    kept = pieces if pieces <= _MAX_KEPT_PIECES else 1

    num_positions, x_stride = T.dynamic("num_positions"), T.dynamic("x_stride")
    map_type, weights_type, experts_type, count_type, data_type = steps.argument_types(
        num_positions, hidden, fmt, given
    )
    sf_type = scales_type(num_positions, 1, ScaleLayout.COL_MAJOR)

    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((num_positions, 2 * hidden), (x_stride, 1), source.dtype),
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
        with T.Kernel(num_blocks, threads=lanes) as block:
            T.annotate_min_blocks_per_sm(config.min_blocks_per_sm(source.alignment))
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
            if given.count:
                steps.clear_counts(total, thread)
            maps = pos_to_token_topk, topk_weights, pos_to_expert
            steps.look_up(*maps, num_positions, block, True, 0, real, weight, given)
            amax = T.reinterpret(least_amax, "int32")
            if kept == pieces:
                for i in T.unroll(pieces):
                    col = (i * lanes + lane) * vec
                    steps.load_piece(x, gate, value, i, block, col, real[0] and col < hidden, source)
                for i in T.unroll(pieces):
                    steps.activate(gate, value, values, i, weight[0], clamp, source, given)
                    if given.count:
                        steps.count_clamped(gate, value, i, clamp, total, source)
                    steps.piece_amax(values, i, amax)
            else:
                for i in T.serial(pieces):
                    col = (i * lanes + lane) * vec
                    steps.load_piece(x, gate, value, 0, block, col, real[0] and col < hidden, source)
                    steps.activate(gate, value, values, 0, weight[0], clamp, source, given)
                    if given.count:
                        steps.count_clamped(gate, value, 0, clamp, total, source)
                    steps.piece_amax(values, 0, amax)
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
                    steps.store_piece(values, data, i, block, col, scale[1], real[0] and col < hidden, fmt)
            else:
                for i in T.serial(pieces):
                    col = (i * lanes + lane) * vec
                    steps.load_piece(x, gate, value, 0, block, col, real[0] and col < hidden, source)
                    steps.activate(gate, value, values, 0, weight[0], clamp, source, given)
                    steps.store_piece(values, data, 0, block, col, scale[1], real[0] and col < hidden, fmt)
            if given.count:
                steps.add_counts(total, clamped_count, thread)

    return swiglu_forward_and_per_token_cast
