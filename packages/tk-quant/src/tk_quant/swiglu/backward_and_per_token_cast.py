"""swiglu_backward_and_per_token_cast: backward of SwiGLU from a quantized input, its result quantized, in one pass.

A thread takes `vec` neighbouring channels of both halves of a row; the lanes that hold a group agree on its two amax by
shuffles. A thread block looks up its rows' indices, then works on `rows` rows at a time and loads the next ones
meanwhile. It sums g * a over each row in shared memory, in a fixed order:

              left half of x, of x_grad      right half                      grad_out, out
            ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐
     rows   │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │
            └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘

Threads then look for pairs of a token and an expert that have no row, and write a gradient of 0 for them. Rows of
padding are not read. Instruction throughput is a limit beside bandwidth: divisions without a branch save instructions.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_core.views import flat
from tk_quant.cast.config import CastSf, layout_of
from tk_quant.cast.format import PLAIN_DTYPES, check_sf_clamp_min, least_amax_of, pair_of
from tk_quant.swiglu.arguments import (
    Rows,
    SwigluOptions,
    check_clamp_value,
    check_gating,
    check_maps_agree,
    check_rows,
)
from tk_quant.swiglu.tile_kernels import backward_cast_called_as_in_2_1, may_be_called

_VEC = 8
"""Neighbouring channels of each half that a thread takes at a time: a piece."""
_MAX_LANES = 256
_GROUPS = (32, 128)
# Pair indices are int32, and in the last thread block they go a little past the last pair.
_MAX_PAIRS = 2**31 - 2**10


@cache
def _threads_of(hidden: int, num_per_channels: int) -> tuple[int, int, int, int, int]:
    """(pieces, lanes, rows, blocks per SM, most turns): how the threads of a thread block are laid out.

    Threads side by side along a row are its lanes; each takes its pieces one after the other. In a turn a thread block
    works on `rows` rows, and loads those of the next turn. The thread blocks that have to fit on an SM cap registers.
    """
    num_lanes = hidden // _VEC
    pieces = ceil_div(num_lanes, _MAX_LANES)
    lanes = align(ceil_div(num_lanes, pieces), num_per_channels // _VEC)
    # H200, 34560 x 2 * 2048, groups of 128: 218.0 us with three turns (61 registers), 219.6 with four, 223.3 with
    # two, 252.5 with one; 222.7 at 16 channels and 80 registers a thread without turns. With several rows at a time
    # two turns are best: three take 2.5 % longer for hidden 288 and 384. Fewer registers don't suffice.
    rows = 1
    if pieces == 1:
        # Maximizes the threads on an SM that have a row. An SM has room for 1024 threads of 64 registers.
        candidates = range(ceil_div(96, lanes), max(_MAX_LANES // lanes, ceil_div(96, lanes)) + 1)
        rows = max(candidates, key=lambda rows: 1024 // align(lanes * rows, 32) * lanes * rows)
    blocks_per_sm = max(1024 // align(lanes * rows, 32), 1)
    return pieces, lanes, rows, blocks_per_sm, ceil_div(3 if rows == 1 else 2, pieces)


# H200, 34560 x 2 * 2048: 220 us where a tile-level kernel takes 264; docs/tuning/tile-level/swiglu.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _swiglu_backward_and_per_token_cast_kernel(
    alignments: tuple[int, int],
    hidden: int,
    num_per_channels: int,
    of_sf: CastSf,
    grad_dtype: torch.dtype,
    options: SwigluOptions,
    with_out: bool,
    arch: Arch,
) -> Any:
    """Build the kernel; `alignments` are those of the rows of x and of grad_out, from `check.row_alignment`."""
    import tilelang.language as T

    from tk_quant.cast.scales import sf_type
    from tk_quant.swiglu import backward_steps as steps
    from tk_quant.swiglu.activation import Scalars, find_segment, is_in_segment

    vec = _VEC
    pieces, lanes, rows, blocks_per_sm, most_turns = _threads_of(hidden, num_per_channels)
    threads, most_rows = align(lanes * rows, 32), rows * most_turns
    assert most_rows <= threads
    code_words, grad_words = vec // 4, vec * grad_dtype.itemsize // 4
    width = options.width * hidden
    sf_cols = width // num_per_channels
    assert 32 % (num_per_channels // vec) == 0
    assert lanes * vec % num_per_channels == 0
    assert lanes * pieces * vec >= hidden

    num_positions, num_tokens, num_topk = T.dynamic("num_positions"), T.dynamic("num_tokens"), T.dynamic("num_topk")
    weights_shape = (num_tokens, num_topk) if options.pairs else (num_positions,)

    @T.prim_func
    def swiglu_backward_and_per_token_cast(
        x: T.Tensor((num_positions, width), "float8_e4m3fn"),
        x_sf: T.Tensor((num_positions, sf_cols), "float32"),
        grad_out: T.Tensor((num_positions, hidden), grad_dtype),
        weight: T.Tensor(weights_shape, "float32") if options.weights else 0,
        pos_to_token_topk: T.Tensor((num_positions,), "int32") if options.pairs else 0,
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32") if options.pairs else 0,
        out: T.Tensor((num_positions, hidden), "bfloat16") if with_out else 0,
        x_grad_data: T.Tensor((num_positions, width), "float8_e4m3fn"),
        x_grad_sf: sf_type(num_positions, sf_cols, of_sf.layout),
        x_grad: T.Tensor((num_positions, width), "bfloat16"),
        weight_grad: T.Tensor(weights_shape, "float32") if options.weights else 0,
        clamp: T.float32,
        least_amax: T.float32,
        num_pairs: T.int32 if options.pairs else 0,
        turns: T.int32,
        num_blocks: T.int32,
        expert_ends: T.Tensor((options.segments[0],), "int32") if options.has_segments else 0,
        routed_scaling_factor: T.float32 if options.scaled else 1.0,
        alpha: T.float32 if options.has_alpha else 1.0,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            # A piece of float32 gradients takes more registers.
            T.annotate_min_blocks_per_sm(blocks_per_sm if grad_dtype.itemsize == 2 else max(blocks_per_sm * 3 // 4, 1))
            thread = T.get_thread_binding()
            lane = thread % lanes
            codes, next_codes = T.alloc_local((2, code_words), "uint32"), T.alloc_local((2, code_words), "uint32")
            piece_sf, next_piece_sf = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            grad, next_grad = T.alloc_local((1, grad_words), "uint32"), T.alloc_local((1, grad_words), "uint32")
            values = T.alloc_local((3, vec), "float32")
            if options.interleaved:
                joined = T.alloc_local((1, 2 * vec), "float32")
            scalars = Scalars(clamp, alpha)
            row_sum = T.alloc_var("float32")
            index, pair_row = T.alloc_var("int32"), T.alloc_var("int32")
            row_sums = T.alloc_shared((most_turns * threads,), "float32")
            indices, targets = T.alloc_shared((most_rows,), "int32"), T.alloc_shared((most_rows,), "int32")
            weights = T.alloc_shared((most_rows,), "float32")
            tile_rows = rows * turns

            if thread < tile_rows:
                row = block * tile_rows + thread
                if row < num_positions:
                    steps.clear_last_word(x_grad_sf, row, sf_cols, of_sf.layout)
                if options.pairs:
                    index = T.reinterpret(T.ldg32(pos_to_token_topk[row], pred=row < num_positions), "int32")
                    index = T.if_then_else(row < num_positions and index < num_pairs, index, -1)
                else:
                    index = T.if_then_else(row < num_positions, row, -1)
                indices[thread] = index
                if options.has_segments:
                    is_real = is_in_segment(row, *find_segment(expert_ends, row), options)
                    # `index` stays, as the weight of such padding gets the sum of nothing, 0.
                    indices[thread] = T.if_then_else(is_real, index, -1)
            T.sync_threads()
            thread_row = thread // lanes
            steps.load_piece(
                *(x, x_sf, grad_out, next_codes, next_piece_sf, next_grad),
                *(T.cast(block * tile_rows + thread_row, "int64"), lane * vec),
                thread < lanes * rows and lane * vec < hidden and indices[thread_row] >= 0,
                *(alignments, options),
            )
            if thread < tile_rows:
                if options.pairs:
                    weights[thread] = T.reinterpret(T.ldg32(weight[0, index], pred=index >= 0), "float32")
                    pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, index], pred=index >= 0), "int32")
                    targets[thread] = T.if_then_else(pair_row == block * tile_rows + thread, index, -1)
                if options.by_position:
                    weights[thread] = T.reinterpret(T.ldg32(weight[index], pred=index >= 0), "float32")
                    pair_row = block * tile_rows + thread
                    targets[thread] = T.if_then_else(pair_row < num_positions, pair_row, -1)
                if options.scaled:
                    weights[thread] = weights[thread] * routed_scaling_factor
            T.sync_threads()
            row_sum = T.float32(0)
            for step in T.serial(turns * pieces):
                of_tile = step // pieces * rows + thread_row
                # Variables: inside an address these sums would be computed in 64 bits.
                row, next_row = T.alloc_var("int32"), T.alloc_var("int32")
                row = block * tile_rows + of_tile
                wide_row = T.cast(row, "int64")
                col = (step % pieces * lanes + lane) * vec
                in_row = thread < lanes * rows and row < num_positions and col < hidden
                steps.take_piece(next_codes, next_piece_sf, codes, piece_sf, options)
                for j in T.unroll(grad_words):
                    grad[0, j] = next_grad[0, j]
                next_of_tile = (step + 1) // pieces * rows + thread_row
                next_row = block * tile_rows + next_of_tile
                next_col = ((step + 1) % pieces * lanes + lane) * vec
                wanted = step + 1 < turns * pieces and thread < lanes * rows and next_col < hidden
                steps.load_piece(
                    *(x, x_sf, grad_out, next_codes, next_piece_sf, next_grad),
                    *(T.cast(next_row, "int64"), next_col),
                    wanted and indices[next_of_tile] >= 0,
                    *(alignments, options),
                )
                if in_row and indices[of_tile] >= 0:
                    steps.differentiate(codes, piece_sf, grad, weights[of_tile], scalars, values, row_sum, options)
                else:
                    for j in T.unroll(vec):
                        values[0, j] = T.float32(0)
                        values[1, j] = T.float32(0)
                        values[2, j] = T.float32(0)
                if in_row:
                    if with_out:
                        steps.store_bf16(out, values, 0, wide_row, col)
                    if not options.interleaved:
                        steps.store_bf16(x_grad, values, 1, wide_row, col)
                    if options.gated and not options.interleaved:
                        steps.store_bf16(x_grad, values, 2, wide_row, hidden + col)
                is_zero = indices[of_tile] < 0 if options.has_segments else None
                if options.interleaved:
                    steps.join_gradients(values, joined)
                    if in_row:
                        steps.store_bf16(x_grad, joined, 0, wide_row, 2 * col)
                    steps.quantize_joined(
                        *(joined, 0, x_grad_data, x_grad_sf, wide_row, 2 * col, in_row, least_amax, is_zero),
                        *(lanes, num_per_channels // (2 * vec), of_sf),
                    )
                elif not options.gated:
                    steps.quantize_joined(
                        *(values, 1, x_grad_data, x_grad_sf, wide_row, col, in_row, least_amax, is_zero),
                        *(lanes, num_per_channels // vec, of_sf),
                    )
                else:
                    steps.quantize(
                        *(values, x_grad_data, x_grad_sf, wide_row, col, in_row, least_amax, is_zero),
                        *(lanes, num_per_channels // vec, of_sf),
                    )
                if step % pieces == pieces - 1:
                    row_sums[step // pieces * threads + thread] = row_sum
                    row_sum = T.float32(0)

            if options.weights:
                T.sync_threads()
                steps.store_row_sums(
                    *(row_sums, targets, weight_grad, row_sum, thread, tile_rows, threads, rows, lanes),
                    *(routed_scaling_factor, options),
                )

            if options.pairs:  # noqa: SIM102, as num_pairs is no argument else
                if block < T.ceildiv(num_pairs, threads):
                    pair = block * threads + thread
                    pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, pair], pred=pair < num_pairs), "int32")
                    index = -1
                    if pair_row >= 0 and pair_row < num_positions:
                        index = pos_to_token_topk[pair_row]
                    if pair < num_pairs and index != pair:
                        weight_grad[0, pair] = T.float32(0)

    return swiglu_backward_and_per_token_cast


@may_be_called(backward_cast_called_as_in_2_1)
@op(aligned=())
def swiglu_backward_and_per_token_cast(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor | None,
    pos_to_token_topk: Tensor | None,
    token_topk_to_pos: Tensor | None,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = True,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor | None, tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """Backward of SwiGLU times a weight for each row, from a quantized input; the forward is computed again.

    With l and r the left and right half of a row of x = data * sf, rounded to float32, g = grad_out, and w the row's
    weight (1 without weights); every operation in float32 to nearest with ties to even, products from left to right,
    fma rounded once:

        d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
        out = a * w;  x_grad = [gs * r * fma(l, 1 - s, 1) | gs * l];  weight_grad = sum of g * a over the row

    or what `swiglu_backward` has for other activations; and for each group of num_per_channels channels of x_grad,
    before it is rounded to bfloat16,

        amax = max(max |x_grad|, 1e-4);  sf = amax / 448;  data = round(x_grad * (448 / amax))
        with round_sf: sf = least power of two >= amax / 448;  data = round(x_grad / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. All
    results are exact but weight_grad, which is summed in float32, in an order that depends only on hidden
    and num_per_channels. Names and formulas are those of DeepSeek's TileKernels 1.0.0. The positional arguments of
    2.1.0 are taken too, and then its results are returned, a tuple of x_grad, (data, sf), weight_grad with weights, and
    out with do_recompute: (x, act_x_grad, fmt, num_per_channels, psum_num_tokens_per_expert, topk_weights,
    routed_scaling_factor, three flags of sf, clamp_value, do_recompute).

    Args:
        x: `(data, sf)`: float8_e4m3fn (num_positions, 2 * hidden), the gate l in the left half, hidden a multiple of
            num_per_channels, and float32 (num_positions, 2 * hidden / num_per_channels), both contiguous. Both may be
            batched by expert, (num_experts, num_rows, ...): then num_positions is num_experts * num_rows, and position
            p is row p % num_rows of expert p // num_rows.
        grad_out: bfloat16 or float32 (num_positions, hidden), or (num_experts, num_rows, hidden) as x; contiguous.
        weight: float32 (num_tokens, num_topk), contiguous; None where there are no weights, or those are by position,
            and then the maps are None too.
        pos_to_token_topk: int32 (num_positions,), or (num_experts, num_rows) as x: index of each row's weight, flat. A
            row where it is negative or past the end is padding: it is not read, out and x_grad are 0 there, and sf is
            that of a group of zeros.
        token_topk_to_pos: int32 (num_tokens, num_topk), the position of each pair of a token and an expert; negative
            where it has none. weight_grad is 0 for these, and for any whose position is not inside x or has another
            pair in pos_to_token_topk. `TK_DEBUG=1` raises ValueError for indices past the end and for maps that
            disagree.
        num_per_channels: Channels of a group, of x and of x_grad: 32 or 128.
        round_sf: Round sf up to a power of two.
        swiglu_clamp_value: c, 2**-126 to infinity: first l is clamped to at most c, and r to [-c, c]; x_grad is 0 at
            clamped elements. NaN stays NaN.
        sf_clamp_min: The least amax instead of 1e-4; at least 448 * 2**-126. Gradients, which may be tiny, need it.
        psum_num_tokens_per_expert: int32 (num_experts,), the position where each expert's rows end. They begin where
            those of the expert before end, rounded up to a multiple of token_alignment. All other rows are padding, and
            the sf of rows of padding are then 0.
        token_alignment: 1 to 65536.
        topk_weights: float32 (num_positions,), contiguous, instead of weight: weights by position.
        routed_scaling_factor: weights are multiplied by it first, rounded to float32, and weight_grad at the end.
        use_tma_aligned_col_major_sf: sf with strides (1, num_positions rounded up to 4), as TMA wants it.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs round_sf.
        clamp_value: The same as swiglu_clamp_value.
        do_recompute: Whether to return out.
        activation, alpha, interleaved, gated, clamp_after: those of `swiglu_backward`. x that is not gated has hidden
            columns. The groups of x and x_grad are channels that lie beside each other, of l and r if interleaved.

    Returns:
        `(out, (data, sf), x_grad, weight_grad)`: out bfloat16, shaped like grad_out, or None without do_recompute; data
        float8_e4m3fn and sf float32, shaped like x; x_grad bfloat16, shaped like data; weight_grad float32, shaped like
        the weights, 0 for padding, or None without weights. Column-major and packed sf have two dimensions, (positions,
        groups).

    Raises:
        TypeError: An argument is not a tensor, number or flag as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    data, sf = pair_of("x", x)
    batched = isinstance(data, Tensor) and data.ndim == 3
    names = ("num_experts", "num_rows") if batched else ("num_positions",)
    gating = check_gating(activation, alpha, interleaved, gated, clamp_after)
    columns = "2 * hidden" if gated else "hidden"
    *leading, width = check.tensor("x[0]", data, (torch.float8_e4m3fn,), (*names, columns))
    device = data.device
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, _GROUPS)
    channels = gating.width * num_per_channels
    check.require(width > 0 and width % channels == 0, "x[0]", "a positive multiple of {} columns", width, channels)
    hidden, sf_shape, num_positions = width // gating.width, (*leading, width // num_per_channels), math.prod(leading)
    check.tensor("x[1]", sf, (torch.float32,), sf_shape, device=device)
    check.tensor("grad_out", grad_out, PLAIN_DTYPES, (*leading, hidden), device=device)
    if weight is not None:
        has_rows = batched and isinstance(pos_to_token_topk, Tensor) and pos_to_token_topk.ndim == 2
        positions = tuple(leading) if has_rows else (num_positions,)
        _check_pairs(weight, pos_to_token_topk, token_topk_to_pos, positions, device)
    else:
        for name, given in (("pos_to_token_topk", pos_to_token_topk), ("token_topk_to_pos", token_topk_to_pos)):
            check.require(given is None, name, "None without weight", "a tensor")
    check.require(weight is None or topk_weights is None, "topk_weights", "None beside weight", "a tensor")
    pairs = None if weight is None else pos_to_token_topk.view(-1)
    weights = topk_weights if weight is None else weight
    of_rows = Rows(pairs, weights, None, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    check_rows(flat(data, 1), of_rows)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    check.flag("do_recompute", do_recompute)
    clamp = check_clamp_value(swiglu_clamp_value, clamp_value)
    check_sf_clamp_min(sf_clamp_min, "e4m3")

    out = new(grad_out.new_empty, grad_out.shape, dtype=torch.bfloat16) if do_recompute else None
    x_grad_data = new(torch.empty_like, data)
    is_like_sf = layout is ScaleLayout.ROW_MAJOR
    x_grad_sf = new(
        *((torch.empty_like, sf) if is_like_sf else (empty_scales, sf, num_positions, sf_shape[-1], layout))
    )
    x_grad = new(grad_out.new_empty, (*leading, width), dtype=torch.bfloat16)
    weight_grad = None if weights is None else new(torch.empty_like, weights)
    if launching(out, x_grad_data, x_grad_sf, x_grad, weight_grad) and num_positions:
        num_pairs = 0 if weight is None else weight.numel()
        _, lanes, rows, blocks_per_sm, most_turns = _threads_of(hidden, num_per_channels)
        # As many turns as still leave two waves of thread blocks, which cover all rows, and all pairs a thread each.
        turns = min(max(num_positions // (2 * rows * blocks_per_sm * get_num_sms(device)), 1), most_turns)
        num_blocks = max(ceil_div(num_positions, rows * turns), ceil_div(num_pairs, align(lanes * rows, 32)))
        arch, alignments = get_arch(device), (check.row_alignment(data), check.row_alignment(grad_out))
        of_sf = CastSf(layout if layout is ScaleLayout.ROW_MAJOR else layout_of(x_grad_sf), round_sf)
        types = of_sf, grad_out.dtype, of_rows.options(gating, clamp), do_recompute
        written = (None if each is None else flat(each, 1) for each in (out, x_grad_data, x_grad_sf, x_grad))
        operands = *(flat(each, 1) for each in (data, sf, grad_out)), weights, pairs, token_topk_to_pos, *written
        _swiglu_backward_and_per_token_cast_kernel(alignments, hidden, num_per_channels, *types, arch)(
            *(each for each in (*operands, weight_grad) if each is not None),
            *(0.0 if clamp is None else clamp, least_amax_of("e4m3", sf_clamp_min)),
            *([] if weight is None else [num_pairs]),
            *(turns, num_blocks, *of_rows.last_operands, *gating.last_operands),
        )
    elif launching(weight_grad):
        weight_grad.zero_()
    return out, (x_grad_data, x_grad_sf), x_grad, weight_grad


def _check_pairs(
    weight: Tensor, pos_to_token_topk: Any, token_topk_to_pos: Any, positions: tuple[int, ...], device: torch.device
) -> None:
    """Check weights by pairs of a token and an expert, and their maps; pos_to_token_topk has the shape `positions`."""
    pairs = check.tensor("weight", weight, (torch.float32,), ("num_tokens", "num_topk"), device=device)
    check.require(weight.numel() <= _MAX_PAIRS, "weight", f"at most {_MAX_PAIRS} elements", weight.numel())
    check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), tuple(pairs), device=device)
    check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), positions, device=device)
    if check.reads_data(weight):  # the two maps must stay inside each other and agree
        check.below("pos_to_token_topk", pos_to_token_topk, token_topk_to_pos.numel(), "indices below {}")
        check.below("token_topk_to_pos", token_topk_to_pos, pos_to_token_topk.numel(), "indices below {}")
        check_maps_agree(pos_to_token_topk, token_topk_to_pos)
