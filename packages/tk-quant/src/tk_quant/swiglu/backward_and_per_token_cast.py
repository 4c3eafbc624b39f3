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
from tk_core.views import flat
from tk_quant.cast.format import check_sf_clamp_min, least_amax_of, pair_of
from tk_quant.swiglu.arguments import SwigluOptions, check_clamp_value, check_maps_agree

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
    round_sf: bool,
    clamps: bool,
    arch: Arch,
) -> Any:
    """Build the kernel; `alignments` are those of the rows of x and of grad_out, from `check.row_alignment`."""
    import tilelang.language as T

    from tk_quant.swiglu import backward_steps as steps

    vec = _VEC
    pieces, lanes, rows, blocks_per_sm, most_turns = _threads_of(hidden, num_per_channels)
    threads, most_rows = align(lanes * rows, 32), rows * most_turns
    assert most_rows <= threads
    code_words, bf16_words = vec // 4, vec // 2
    sf_cols = 2 * hidden // num_per_channels
    options = SwigluOptions(weights=True, experts=False, clamp=clamps)
    assert 32 % (num_per_channels // vec) == 0
    assert lanes * vec % num_per_channels == 0
    assert lanes * pieces * vec >= hidden

    num_positions, num_tokens, num_topk = T.dynamic("num_positions"), T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def swiglu_backward_and_per_token_cast(
        x: T.Tensor((num_positions, 2 * hidden), "float8_e4m3fn"),
        x_sf: T.Tensor((num_positions, sf_cols), "float32"),
        grad_out: T.Tensor((num_positions, hidden), "bfloat16"),
        weight: T.Tensor((num_tokens, num_topk), "float32"),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out: T.Tensor((num_positions, hidden), "bfloat16"),
        x_grad_data: T.Tensor((num_positions, 2 * hidden), "float8_e4m3fn"),
        x_grad_sf: T.Tensor((num_positions, sf_cols), "float32"),
        x_grad: T.Tensor((num_positions, 2 * hidden), "bfloat16"),
        weight_grad: T.Tensor((num_tokens, num_topk), "float32"),
        clamp: T.float32,
        least_amax: T.float32,
        num_pairs: T.int32,
        turns: T.int32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            thread = T.get_thread_binding()
            lane = thread % lanes
            codes, next_codes = T.alloc_local((2, code_words), "uint32"), T.alloc_local((2, code_words), "uint32")
            piece_sf, next_piece_sf = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            grad, next_grad = T.alloc_local((1, bf16_words), "uint32"), T.alloc_local((1, bf16_words), "uint32")
            values = T.alloc_local((3, vec), "float32")
            row_sum = T.alloc_var("float32")
            index, pair_row = T.alloc_var("int32"), T.alloc_var("int32")
            row_sums = T.alloc_shared((most_turns * threads,), "float32")
            indices, targets = T.alloc_shared((most_rows,), "int32"), T.alloc_shared((most_rows,), "int32")
            weights = T.alloc_shared((most_rows,), "float32")
            tile_rows = rows * turns

            if thread < tile_rows:
                row = block * tile_rows + thread
                index = T.reinterpret(T.ldg32(pos_to_token_topk[row], pred=row < num_positions), "int32")
                index = T.if_then_else(row < num_positions and index < num_pairs, index, -1)
                indices[thread] = index
            T.sync_threads()
            thread_row = thread // lanes
            steps.load_piece(
                *(x, x_sf, grad_out, next_codes, next_piece_sf, next_grad),
                *(T.cast(block * tile_rows + thread_row, "int64"), lane * vec),
                thread < lanes * rows and lane * vec < hidden and indices[thread_row] >= 0,
                alignments,
            )
            if thread < tile_rows:
                weights[thread] = T.reinterpret(T.ldg32(weight[0, index], pred=index >= 0), "float32")
                pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, index], pred=index >= 0), "int32")
                targets[thread] = T.if_then_else(pair_row == block * tile_rows + thread, index, -1)
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
                for half in T.unroll(2):
                    piece_sf[half] = next_piece_sf[half]
                    for j in T.unroll(code_words):
                        codes[half, j] = next_codes[half, j]
                for j in T.unroll(bf16_words):
                    grad[0, j] = next_grad[0, j]
                next_of_tile = (step + 1) // pieces * rows + thread_row
                next_row = block * tile_rows + next_of_tile
                next_col = ((step + 1) % pieces * lanes + lane) * vec
                wanted = step + 1 < turns * pieces and thread < lanes * rows and next_col < hidden
                steps.load_piece(
                    *(x, x_sf, grad_out, next_codes, next_piece_sf, next_grad),
                    *(T.cast(next_row, "int64"), next_col),
                    wanted and indices[next_of_tile] >= 0,
                    alignments,
                )
                if in_row and indices[of_tile] >= 0:
                    steps.differentiate(codes, piece_sf, grad, weights[of_tile], clamp, values, row_sum, options)
                else:
                    for j in T.unroll(vec):
                        values[0, j] = T.float32(0)
                        values[1, j] = T.float32(0)
                        values[2, j] = T.float32(0)
                if in_row:
                    steps.store_bf16(out, values, 0, wide_row, col)
                    steps.store_bf16(x_grad, values, 1, wide_row, col)
                    steps.store_bf16(x_grad, values, 2, wide_row, hidden + col)
                steps.quantize(values, x_grad_data, x_grad_sf, wide_row, col, in_row, least_amax, lanes, round_sf)
                if step % pieces == pieces - 1:
                    row_sums[step // pieces * threads + thread] = row_sum
                    row_sum = T.float32(0)

            T.sync_threads()
            steps.store_row_sums(row_sums, targets, weight_grad, row_sum, thread, tile_rows, threads, rows, lanes)

            if block < T.ceildiv(num_pairs, threads):
                pair = block * threads + thread
                pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, pair], pred=pair < num_pairs), "int32")
                index = -1
                if pair_row >= 0 and pair_row < num_positions:
                    index = pos_to_token_topk[pair_row]
                if pair < num_pairs and index != pair:
                    weight_grad[0, pair] = T.float32(0)

    return swiglu_backward_and_per_token_cast


@op(aligned=())
def swiglu_backward_and_per_token_cast(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Backward of SwiGLU times a weight for each row, from a quantized input; the forward is computed again.

    With l and r the left and right half of a row of x = data * sf, rounded to float32, g = grad_out, and w the row's
    weight; every operation in float32 to nearest with ties to even, products from left to right, fma rounded once:

        d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
        out = a * w;  x_grad = [gs * r * fma(l, 1 - s, 1) | gs * l];  weight_grad = sum of g * a over the row

    and for each group of num_per_channels channels of x_grad, before it is rounded to bfloat16,

        amax = max(max |x_grad|, 1e-4);  sf = amax / 448;  data = round(x_grad * (448 / amax))
        with round_sf: sf = least power of two >= amax / 448;  data = round(x_grad / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. All
    results are exact but weight_grad, which is summed in float32, in an order that depends only on hidden
    and num_per_channels. Names and formulas are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: `(data, sf)`: float8_e4m3fn (num_positions, 2 * hidden), the gate l in the left half, hidden a multiple of
            num_per_channels, and float32 (num_positions, 2 * hidden / num_per_channels), both contiguous. Both may be
            batched by expert, (num_experts, num_rows, ...): then num_positions is num_experts * num_rows, and position
            p is row p % num_rows of expert p // num_rows.
        grad_out: bfloat16 (num_positions, hidden), or (num_experts, num_rows, hidden) as x; contiguous.
        weight: float32 (num_tokens, num_topk), contiguous.
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

    Returns:
        `(out, (data, sf), x_grad, weight_grad)`: out bfloat16, shaped like grad_out; data float8_e4m3fn and sf float32,
        shaped like x; x_grad bfloat16, shaped like data; weight_grad float32 (num_tokens, num_topk).

    Raises:
        TypeError: An argument is not a tensor, number or flag as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    data, sf = pair_of("x", x)
    batched = isinstance(data, Tensor) and data.ndim == 3
    names = ("num_experts", "num_rows") if batched else ("num_positions",)
    *leading, width = check.tensor("x[0]", data, (torch.float8_e4m3fn,), (*names, "2 * hidden"))
    device = data.device
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, _GROUPS)
    channels = 2 * num_per_channels
    check.require(width > 0 and width % channels == 0, "x[0]", "a positive multiple of {} columns", width, channels)
    hidden, sf_shape, num_positions = width // 2, (*leading, width // num_per_channels), math.prod(leading)
    check.tensor("x[1]", sf, (torch.float32,), sf_shape, device=device)
    check.tensor("grad_out", grad_out, (torch.bfloat16,), (*leading, hidden), device=device)
    pairs = check.tensor("weight", weight, (torch.float32,), ("num_tokens", "num_topk"), device=device)
    check.require(weight.numel() <= _MAX_PAIRS, "weight", f"at most {_MAX_PAIRS} elements", weight.numel())
    check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), tuple(pairs), device=device)
    is_flat = not (batched and isinstance(pos_to_token_topk, Tensor) and pos_to_token_topk.ndim == 2)
    positions = (num_positions,) if is_flat else tuple(leading)
    check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), positions, device=device)
    check.flag("round_sf", round_sf)
    check_clamp_value(swiglu_clamp_value)
    check_sf_clamp_min(sf_clamp_min, "e4m3")
    if check.reads_data(data):  # the two maps must stay inside each other and agree
        check.below("pos_to_token_topk", pos_to_token_topk, token_topk_to_pos.numel(), "indices below {}")
        check.below("token_topk_to_pos", token_topk_to_pos, num_positions, "indices below {}")
        check_maps_agree(pos_to_token_topk, token_topk_to_pos)

    out = new(torch.empty_like, grad_out)
    x_grad_data, x_grad_sf = new(torch.empty_like, data), new(torch.empty_like, sf)
    x_grad, weight_grad = new(grad_out.new_empty, (*leading, width)), new(torch.empty_like, weight)
    results = out, x_grad_data, x_grad_sf, x_grad
    if launching(*results, weight_grad) and num_positions:
        num_pairs, clamps = weight.numel(), swiglu_clamp_value is not None
        arch, alignments = get_arch(data.device), (check.row_alignment(data), check.row_alignment(grad_out))
        _, lanes, rows, blocks_per_sm, most_turns = _threads_of(hidden, num_per_channels)
        # As many turns as still leave two waves of thread blocks, which cover all rows, and all pairs a thread each.
        turns = min(max(num_positions // (2 * rows * blocks_per_sm * get_num_sms(data.device)), 1), most_turns)
        num_blocks = max(ceil_div(num_positions, rows * turns), ceil_div(num_pairs, align(lanes * rows, 32)))
        _swiglu_backward_and_per_token_cast_kernel(alignments, hidden, num_per_channels, round_sf, clamps, arch)(
            *(flat(each, 1) for each in (data, sf, grad_out)),
            *(weight, pos_to_token_topk.view(-1), token_topk_to_pos),
            *(flat(each, 1) for each in results),
            *(weight_grad, swiglu_clamp_value if clamps else 0.0, least_amax_of("e4m3", sf_clamp_min)),
            *(num_pairs, turns, num_blocks),
        )
    elif launching(weight_grad):
        weight_grad.zero_()
    return out, (x_grad_data, x_grad_sf), x_grad, weight_grad
