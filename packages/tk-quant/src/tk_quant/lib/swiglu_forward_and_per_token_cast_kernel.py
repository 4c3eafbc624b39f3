"""The kernels of swiglu_forward_and_per_token_cast; see there for the formulas and a picture."""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_quant.lib.cast_formats import ELEMENTS, CastInput, CastScales
from tk_quant.lib.quantize import BITS
from tk_quant.swiglu.swiglu_forward import Given

# Pieces that a thread keeps in registers. A thread with more pieces computes all of them twice.
_MAX_KEPT_PIECES = 4


@dataclass(frozen=True)
class SwigluCastConfig:
    """Launch knobs: how the threads of a thread block are laid out over rows and channels."""

    vec: int
    """Neighbouring channels that a thread takes at a time: a piece."""
    pieces: int
    """Pieces of a thread: more than one if a thread block takes a whole row that is wider than `lanes` pieces."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Rows of a thread block, each with `lanes` threads of its own."""
    blocks_per_sm: int
    """Thread blocks that have to fit on an SM, which caps registers."""

    @staticmethod
    @cache
    def best(
        hidden: int, num_per_channels: int, x_bits: int, share_word: bool, clamps: bool, arch: Arch
    ) -> "SwigluCastConfig":
        """Configuration for these sizes. `share_word`: four groups share a word of sf; `clamps`: there is a clamp."""
        # H200, 34816 x 2 * 2048: 84.5 us with 1536 threads (40 registers each), 88.5 with 1280, 100.4 with the 68
        # registers that nvcc takes by itself; vec 8 takes 105, two pieces 89.9, a row ahead in a persistent grid 86.5.
        # With a clamp 40 registers are too few; float32 takes 52. Hidden 640: 40 lanes x 4 rows 31.6 us, 8 x 16 30.9.
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
            # Groups that are whole rows take more registers too.
            few_registers = fits_warp(num_per_channels, vec) and not clamps
            threads = 1536 if few_registers else 1280 if rows == 1 else 1024
        return SwigluCastConfig(vec, pieces, lanes, rows, max(threads // (lanes * rows), 1))

    def min_blocks_per_sm(self, alignment: int) -> int:
        """`blocks_per_sm` for rows of x with this alignment in bytes: narrow loads take more registers."""
        return max(self.blocks_per_sm * (4 if alignment >= 8 else 3) // 4, 1)

    def num_blocks(self, num_rows: int, hidden: int) -> int:
        """Thread blocks of a launch."""
        return ceil_div(num_rows, self.rows) * ceil_div(hidden, self.lanes * self.vec * self.pieces)


def fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether the lanes of a group are a power of two and at most 32, so that shuffles in a warp can reduce it."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


# H200, 34816 x 2 * 2048: 81.8 us for 1 x 128 where tile-level kernels take 86.5; docs/tuning/tile-level/swiglu.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def swiglu_cast_kernel(
    hidden: int,
    source: CastInput,
    fmt: str,
    num_per_channels: int,
    scales: CastScales,
    given: Given,
    config: SwigluCastConfig,
    arch: Arch,
) -> Any:
    """Build the kernel: neighbouring lanes of a warp hold a group, or a thread block takes a whole row as the group."""
    import tilelang.language as T

    from tk_quant.lib import swiglu_forward_and_per_token_cast_steps as steps
    from tk_quant.lib.scales_io import scale_of_bounded_amax, scales_type

    vec, pieces, lanes = config.vec, config.pieces, config.lanes
    words_per_piece = vec * source.dtype.itemsize // 4
    in_warp = fits_warp(num_per_channels, vec)
    group_lanes, num_groups = num_per_channels // vec if in_warp else lanes, hidden // num_per_channels
    exchanges = min(group_lanes, 32).bit_length() - 1
    assert lanes % (group_lanes * (4 if scales.in_bytes else 1)) == 0
    assert in_warp or lanes % 32 == 0
    col_tiles = ceil_div(hidden, lanes * vec * pieces)
    kept = pieces if pieces <= _MAX_KEPT_PIECES else 1
    each_piece = T.unroll if kept == pieces else T.serial

    num_positions, x_stride = T.dynamic("num_positions"), T.dynamic("x_stride", "int64")
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    # Where an argument is not given, the caller passes a 0, which costs the host less than a tensor.
    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((num_positions, 2 * hidden), (x_stride, 1), source.dtype),
        pos_to_token_topk: T.Tensor((num_positions,), "int32") if given.weights else T.int32,
        topk_weights: T.Tensor((num_tokens, num_topk), "float32") if given.weights else T.int32,
        pos_to_expert: T.Tensor((num_positions,), "int32") if given.experts else T.int32,
        clamped_count: T.Tensor((3,), "int64") if given.count else T.int32,
        data: T.Tensor((num_positions, hidden * BITS[fmt] // 8), ELEMENTS[fmt]),
        sf: scales_type(num_positions, num_groups, scales.layout),
        clamp: T.float32,
        least_amax: T.float32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=align(lanes * config.rows, 32)) as block:
            T.annotate_min_blocks_per_sm(config.min_blocks_per_sm(source.alignment))
            thread = T.get_thread_binding()
            lane = thread % lanes
            gate = T.alloc_local((kept, words_per_piece), "uint32")
            value = T.alloc_local((kept, words_per_piece), "uint32")
            values = T.alloc_local((kept, vec), "float32")
            real = T.alloc_local((1,), "bool")
            weight = T.alloc_local((1,), "float32")
            amax = T.alloc_var("int32")
            scale = T.alloc_local((2,), "float32")
            total = T.alloc_shared((3,), "int32")  # numbers of elements that the clamp changes
            if given.count:
                if thread < 3:
                    total[thread] = 0
                T.sync_threads()
            # Variables: inside an address these divisions would be computed in 64 bits.
            row, col = T.alloc_var("int32"), T.alloc_var("int32")
            row = block // col_tiles * config.rows + thread // lanes
            col = (block % col_tiles * lanes + lane) * vec
            maps = pos_to_token_topk, topk_weights, pos_to_expert
            steps.look_up(*maps, num_positions, row, col < hidden and thread < lanes * config.rows, real, weight, given)
            amax = T.reinterpret(least_amax, "int32")
            for i in each_piece(pieces):
                place, piece = col + i * lanes * vec, i if kept == pieces else 0
                steps.load_piece(x, gate, value, piece, row, place, real[0] and place < hidden, source)
                steps.activate(gate, value, values, piece, weight[0], clamp, source, given)
                if given.count:
                    steps.count_clamped(gate, value, piece, clamp, total, source)
                steps.piece_amax(values, piece, amax)
            for j in T.unroll(exchanges):
                amax = T.max(amax, T.shfl_xor(amax, 1 << j))
            if not in_warp and lanes > 32:
                warp_amax = T.alloc_shared((32,), "int32")
                if thread % 32 == 0:
                    warp_amax[thread // 32] = amax
                T.sync_threads()
                amax = T.if_then_else(thread % 32 < lanes // 32, warp_amax[thread % 32], 0)
                for j in T.unroll(5):
                    amax = T.max(amax, T.shfl_xor(amax, 1 << j))
            scale[0], scale[1] = scale_of_bounded_amax(amax, fmt, scales.round_sf)
            steps.store_sf(sf, scale[0], row, col, lane, real[0], hidden, num_per_channels, group_lanes, scales.layout)
            for i in each_piece(pieces):
                place, piece = col + i * lanes * vec, i if kept == pieces else 0
                if kept < pieces:
                    steps.load_piece(x, gate, value, piece, row, place, real[0] and place < hidden, source)
                    steps.activate(gate, value, values, piece, weight[0], clamp, source, given)
                steps.store_piece(values, data, piece, row, place, scale[1], real[0] and place < hidden, fmt)
            if given.count:
                T.sync_threads()
                if thread < 3 and total[thread] > 0:
                    T.atomic_add(clamped_count[thread], T.cast(total[thread], "int64"))

    return swiglu_forward_and_per_token_cast
