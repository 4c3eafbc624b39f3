"""swiglu_forward_and_per_token_cast: SwiGLU, a weight for each row, and the cast by groups of channels, in one pass.

A thread takes `vec` neighbouring channels of both halves of a row. A group is owned by neighbouring lanes of one warp,
which agree on amax by shuffles; the lanes of four groups assemble a word of packed sf, also by shuffles:

               left half of x                 right half                     hidden 2048, vec 16: 128 lanes
            ┌─────────┬─────────┬─  ─┐    ┌─────────┬─────────┬─  ─┐
    rows    │ l0 … l7 │ l8… l15 │ …  │    │ l0 … l7 │ l8… l15 │ …  │         lanes  0 … 7   8 … 15   16 … 23 …
            │         │         │    │    │         │         │    │         group     0       1         2
            └─────────┴─────────┴─  ─┘    └─────────┴─────────┴─  ─┘

If a group's lanes are no power of two or more than a warp, the group is a whole row, and a thread block takes it.
Rows of padding are not read, and not written except zeros in swizzled sf. A thread waits for its row's index and then
for 64 bytes of x, so as many threads as possible have to fit on an SM: registers are capped. Divisions without a
branch keep the kernel bound by memory.
"""

from functools import cache
from math import gcd
from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.cast.config import CastInput, CastSf, layout_of
from tk_quant.cast.format import BITS, DTYPES, PLAIN_DTYPES, check_sf_clamp_min, data_output, least_amax_of
from tk_quant.swiglu.arguments import (
    Rows,
    SwigluOptions,
    check_clamp_value,
    check_clamped_count,
    check_gating,
    check_rows,
)
from tk_quant.swiglu.tile_kernels import forward_cast_called_as_in_2_1, may_be_called

_FORMATS = ("e4m3", "e2m1")
_GROUPS = (32, 128)
_ROWS_OF_SWIZZLED_TILE = 128
# Pieces that a thread keeps in registers. A thread with more pieces computes all of them twice.
_MAX_KEPT_PIECES = 4
_VEC = 16
"""Neighbouring channels that a thread takes at a time: a piece."""


@cache
def _threads_of(
    hidden: int, num_per_channels: int, x_bits: int, share_word: bool, takes_registers: bool
) -> tuple[int, int, int, int]:
    """(pieces, lanes, rows, blocks per SM): how the threads of a thread block are laid out over rows and channels.

    Threads side by side along a row are its lanes. A thread has more than one piece if a thread block takes a whole row
    that is wider than `lanes` pieces. The thread blocks that have to fit on an SM cap registers. `share_word`: four
    groups share a word of sf; `takes_registers`: there is a clamp, or x is interleaved.
    """
    # H200, 34816 x 2 * 2048: 84.5 us with 1536 threads (40 registers each), 88.5 with 1280, 100.4 with the 68
    # registers that nvcc takes by itself; vec 8 takes 105, two pieces 89.9, a row ahead in a persistent grid 86.5.
    # With a clamp or interleaved 40 registers are too few; float32 takes 52. Hidden 640: 40 lanes x 4 rows 31.6 us, 8 x
    # 16 30.9.
    num_lanes = hidden // _VEC
    if _fits_warp(num_per_channels):
        unit = num_per_channels // _VEC * (4 if share_word else 1)
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
        few_registers = _fits_warp(num_per_channels) and not takes_registers
        threads = 1536 if few_registers else 1280 if rows == 1 else 1024
    return pieces, lanes, rows, max(threads // (lanes * rows), 1)


def _fits_warp(num_per_channels: int) -> bool:
    """Whether the lanes of a group are a power of two and at most 32, so that shuffles in a warp can reduce it."""
    lanes = num_per_channels // _VEC
    return lanes <= 32 and lanes & (lanes - 1) == 0


# H200, 34816 x 2 * 2048: 81.8 us for 1 x 128 where tile-level kernels take 86.5; docs/tuning/tile-level/swiglu.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _swiglu_forward_and_per_token_cast_kernel(
    hidden: int,
    source: CastInput,
    fmt: str,
    num_per_channels: int,
    of_sf: CastSf,
    options: SwigluOptions,
    arch: Arch,
) -> Any:
    """Build the kernel: neighbouring lanes of a warp hold a group, or a thread block takes a whole row as the group."""
    import tilelang.language as T

    from tk_core.macros.quantize import sf_of_amax
    from tk_quant.cast.scales import sf_type
    from tk_quant.swiglu import forward_steps as steps
    from tk_quant.swiglu.activation import Scalars

    vec, bits = _VEC, source.bits
    threads_for = hidden, num_per_channels, bits, of_sf.in_bytes, options.clamp or options.interleaved
    pieces, lanes, rows, blocks_per_sm = _threads_of(*threads_for)
    words_per_piece = vec * source.dtype.itemsize // 4
    in_warp = _fits_warp(num_per_channels)
    group_lanes, num_groups = num_per_channels // vec if in_warp else lanes, hidden // num_per_channels
    exchanges = min(group_lanes, 32).bit_length() - 1
    assert lanes % (group_lanes * (4 if of_sf.in_bytes else 1)) == 0
    assert in_warp or lanes % 32 == 0
    col_tiles = ceil_div(hidden, lanes * vec * pieces)
    kept = pieces if pieces <= _MAX_KEPT_PIECES else 1
    num_counts = options.count or 3
    each_piece = T.unroll if kept == pieces else T.serial

    num_positions, x_stride = T.dynamic("num_positions"), T.dynamic("x_stride", "int64")
    weights_shape = (T.dynamic("num_tokens"), T.dynamic("num_topk")) if options.pairs else (num_positions,)

    # Where an argument is not options, the caller passes a 0, which costs the host less than a tensor.
    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((num_positions, options.width * hidden), (x_stride, 1), source.dtype),
        pos_to_token_topk: T.Tensor((num_positions,), "int32") if options.pairs else T.int32,
        topk_weights: T.Tensor(weights_shape, "float32") if options.weights else T.int32,
        pos_to_expert: T.Tensor((num_positions,), "int32") if options.experts else T.int32,
        clamped_count: T.Tensor((options.count,), "int64") if options.count else T.int32,
        data: T.Tensor((num_positions, hidden * BITS[fmt] // 8), T.dtype(DTYPES[fmt])),
        sf: sf_type(num_positions, num_groups, of_sf.layout),
        clamp: T.float32,
        least_amax: T.float32,
        num_blocks: T.int32,
        expert_ends: T.Tensor((options.segments[0],), "int32") if options.has_segments else 0,
        routed_scaling_factor: T.float32 if options.scaled else 1.0,
        alpha: T.float32 if options.has_alpha else 1.0,
    ) -> None:
        with T.Kernel(num_blocks, threads=align(lanes * rows, 32)) as block:
            # Narrow loads take more registers.
            T.annotate_min_blocks_per_sm(max(blocks_per_sm * (4 if source.alignment >= 8 else 3) // 4, 1))
            thread = T.get_thread_binding()
            lane = thread % lanes
            gate = T.alloc_local((kept, words_per_piece * (2 if options.interleaved else 1)), "uint32")
            value = gate if options.interleaved else T.alloc_local((kept, words_per_piece), "uint32")
            values = T.alloc_local((kept, vec), "float32")
            real = T.alloc_local((1,), "bool")
            weight = T.alloc_local((1,), "float32")
            amax = T.alloc_var("int32")
            sf_and_factor = T.alloc_local((2,), "float32")
            # Numbers of elements that the clamp changes, and of all.
            total = T.alloc_shared((num_counts,), "int32")
            if options.count:
                if thread < options.count:
                    total[thread] = 0
                T.sync_threads()
            # Variables: inside an address these divisions would be computed in 64 bits.
            row, col = T.alloc_var("int32"), T.alloc_var("int32")
            row = block // col_tiles * rows + thread // lanes
            col = (block % col_tiles * lanes + lane) * vec
            scalars = Scalars(clamp, alpha)
            maps = steps.RowMaps(pos_to_token_topk, topk_weights, pos_to_expert, expert_ends, routed_scaling_factor)
            steps.look_up(maps, num_positions, row, col < hidden and thread < lanes * rows, real, weight, options)
            amax = T.reinterpret(least_amax, "int32")
            for i in each_piece(pieces):
                channel, piece = col + i * lanes * vec, i if kept == pieces else 0
                steps.load_piece(x, gate, value, piece, row, channel, real[0] and channel < hidden, source, options)
                steps.activate(gate, value, values, piece, weight[0], scalars, source, options)
                if options.count:
                    steps.count_clamped(gate, value, piece, vec, scalars, total, source, options)
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
            sf_and_factor[0], sf_and_factor[1] = sf_of_amax(amax, fmt, of_sf.round_sf)
            sizes = hidden, num_per_channels, group_lanes
            steps.store_sf(sf, sf_and_factor[0], row, col, lane, real[0], *sizes, of_sf.layout)
            for i in each_piece(pieces):
                channel, piece = col + i * lanes * vec, i if kept == pieces else 0
                if kept < pieces:
                    steps.load_piece(x, gate, value, piece, row, channel, real[0] and channel < hidden, source, options)
                    steps.activate(gate, value, values, piece, weight[0], scalars, source, options)
                steps.store_piece(
                    values, data, piece, row, channel, sf_and_factor[1], real[0] and channel < hidden, fmt
                )
            if options.count:
                if options.count == 4:
                    is_first = real[0] and col == 0
                    if is_first:
                        T.atomic_add(total[3], hidden)
                T.sync_threads()
                if thread < options.count and total[thread] > 0:
                    T.atomic_add(clamped_count[thread], T.cast(total[thread], "int64"))

    return swiglu_forward_and_per_token_cast


@may_be_called(forward_cast_called_as_in_2_1)
@op(writes=("clamped_count",), aligned=())
def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    use_swizzled_sf: bool = False,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor, Tensor]:
    """SwiGLU of each row, times its weight where there are weights, quantized by groups of channels in the same pass.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right; max and least amax are 448 and 1e-4 for e4m3, 6 and 6 * 2**-126 for e2m1:

        out = l / (1 + exp(-l)) * r * weight;  amax = max(max |out|, least amax)
        sf = amax / max;  data = round(out * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(out / sf)

    `swiglu_forward` has the formulas of other activations. data saturates and keeps the sign of zero. A group with NaN
    or infinity in it has NaN or infinity for its sf, and its data are unspecified for e2m1. Names and formulas are
    those of DeepSeek's TileKernels 1.0.0; groups of 32, e2m1 and swizzled sf are not in it. The positional arguments of
    2.1.0 are taken too: (x, fmt, num_per_channels, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
    three flags, clamp_value, clamped_count).

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, the gate l in the left half; hidden a multiple of 128, rows
            may be strided.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 32, 128 or hidden; 0 means hidden too.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32, (num_tokens, num_topk) beside pos_to_token_topk, else (num_positions,).
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Data and sf of padding rows are
            unspecified (swizzled sf: 0), and x is not read there.
        use_tma_aligned_col_major_sf: sf with strides (1, num_positions rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs round_sf.
        swiglu_clamp_value: c, 2**-126 to infinity: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        clamped_count: int64 (3,) or (4,), to which the numbers of l > c, r > c and r < -c in rows that are not padding
            are added in place, and to the fourth the number of elements of these rows of data. Needs a clamp value.
        sf_clamp_min: The least amax instead of the format's; at least max * 2**-126.
        use_swizzled_sf: sf as Blackwell's block-scaled matrix products read it; needs round_sf.
        psum_num_tokens_per_expert: int32 (num_experts,), the position where each expert's rows end. They begin where
            those of the expert before end, rounded up to a multiple of token_alignment. All other rows are padding.
        token_alignment: 1 to 65536.
        routed_scaling_factor: weights are multiplied by it first, rounded to float32.
        clamp_value: The same as swiglu_clamp_value.
        activation, alpha, interleaved, gated, clamp_after: those of `swiglu_forward`. x that is not gated is
            (num_positions, hidden).

    Returns:
        `(data, sf)`: data float8_e4m3fn (num_positions, hidden), or int8 (num_positions, hidden / 2) with the even
        channel in the low nibble; sf float32 (num_positions, hidden / num_per_channels), or packed int32 with a quarter
        of the columns, or swizzled float8_e8m0fnu (see tk_core.scales). Layouts other than row major are for groups of
        32 and 128.

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    check.require(round_sf or not use_swizzled_sf, "use_swizzled_sf", "False without round_sf", use_swizzled_sf)
    gating = check_gating(activation, alpha, interleaved, gated, clamp_after)
    columns = "2 * hidden" if gated else "hidden"
    num_positions, width = check.tensor("x", x, PLAIN_DTYPES, ("num_positions", columns), layout="rows")
    multiple = 128 * gating.width
    check.require(width > 0 and width % multiple == 0, "x", "a positive multiple of {} columns", width, multiple)
    hidden = width // gating.width
    check.one_of("fmt", fmt, _FORMATS)
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden, 0))
    num_per_channels = num_per_channels or hidden
    if layout is not ScaleLayout.ROW_MAJOR and num_per_channels not in _GROUPS:
        check.require(False, "num_per_channels", f"32 or 128 for sf in layout {layout.name}", num_per_channels)
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    of_rows = Rows(*maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    check_rows(x, of_rows)
    clamp = check_clamp_value(swiglu_clamp_value, clamp_value)
    check_clamped_count(x, clamped_count, clamp)
    check_sf_clamp_min(sf_clamp_min, fmt)
    data = data_output("data", None, x, num_positions, hidden, fmt)
    sf = new(empty_scales, x, num_positions, hidden // num_per_channels, layout)
    if launching(data, sf):
        arch = get_arch(x.device)
        source, of_sf = CastInput(x.dtype, check.row_alignment(x)), CastSf(layout_of(sf), round_sf)
        options = of_rows.options(gating, clamp, clamped_count)
        threads_for = hidden, num_per_channels, source.bits, of_sf.in_bytes, options.clamp or interleaved
        pieces, lanes, rows, _ = _threads_of(*threads_for)
        num_rows = align(num_positions, _ROWS_OF_SWIZZLED_TILE) if use_swizzled_sf else num_positions
        _swiglu_forward_and_per_token_cast_kernel(hidden, source, fmt, num_per_channels, of_sf, options, arch)(
            x,
            *(0 if each is None else each for each in (*maps, clamped_count)),
            data,
            sf,
            0.0 if clamp is None else float(clamp),
            least_amax_of(fmt, sf_clamp_min),
            ceil_div(num_rows, rows) * ceil_div(hidden, lanes * _VEC * pieces),
            *(*of_rows.last_operands, *gating.last_operands),
        )
    return data, sf
