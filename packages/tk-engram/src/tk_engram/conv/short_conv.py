"""short_conv: a depthwise causal convolution over normalized tokens, with SiLU: the last part of an Engram layer.

    n[t] = u[t] · rsqrt(mean_H(u[t]²) + eps) · norm_weight
    y[t] = Σ_j conv_weight[j] · n[t - (3 - j) · dilation], j = 0 … 3
    out  = bf16(SiLU(y) [+ u + residual])

for each stream and channel on its own, in float32. Rows before the sequence are 0, or those of the state.
Source: ShortConv of the Engram demo, "Conditional Memory via Scalable Lookup", arXiv 2601.07372.

Without a state and for most sizes up to 8192 channels, one pass over u: thread blocks walk over whole rows, tokens
that are a dilation apart (see `lib/conv.py` and `lib/conv_rows.py`).

Otherwise two passes: the rstd of all rows, then the convolution, in thread blocks that take a few channels of one
stream and walk likewise. Both ways give the same bits:

    channels        [ thread 0 | thread 1 | … | thread 127 ]        each field 8 channels, one 16-byte load
    token t - 3d    in registers, normalized
    token t - 2d    in registers, normalized
    token t - d     in registers, normalized
    token t         y, SiLU, out
    token t + d …   in flight

With a state a third launch updates it.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_engram.lib.conv import ChannelTile, check_conv, launch_rstd, launch_sequences
from tk_engram.lib.conv_rows import ConvRowsConfig, rows_walk_length, short_conv_rows_kernel, takes_whole_rows

_ROWS_IN_FLIGHT = 4
"""Rows of a step, a load of a thread each. m 4, H 7168, 8192 tokens on an H200: with 2, 4 and 8 424 µs, 382, 382."""


def walk_length(num_tokens: int, num_rows: int, num_sms: int) -> int:
    """Tokens of a walk: as many as leave every SM 16 thread blocks, at most 61.

    Each walk reads three rows more, so longer ones read less in all. `num_rows`: streams times tiles of channels.
    """
    for length in (61, 29, 13, 5):
        if num_tokens * num_rows >= 16 * num_sms * length:
            return length
    return 1


@kernel(pass_configs=DIRECT_COPIES)
def _short_conv_kernel(
    mhc_mult: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    is_packed: bool,
    has_residual: bool,
    has_state: bool,
    arch: Arch,
) -> Any:
    """`dtypes`: of norm_weight and conv_weight."""
    import tilelang.language as T

    from tk_engram.lib import conv_tile
    from tk_engram.lib.gate_tiles import channels_of_threads

    tile, in_flight = ChannelTile.best(hidden), _ROWS_IN_FLIGHT
    channels, num_tiles = tile.channels, tile.num_tiles
    num_tokens, num_state_rows = T.dynamic("num_tokens"), T.dynamic("num_state_rows")

    @T.prim_func
    def short_conv(
        u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        norm_weight: T.Tensor((mhc_mult, hidden), dtypes[0]),
        conv_weight: T.Tensor((mhc_mult, hidden, 4), dtypes[1]),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        state: T.Tensor((num_state_rows, mhc_mult, hidden), "bfloat16"),
        rstd: T.Tensor((num_tokens, mhc_mult), "float32"),
        state_rstd: T.Tensor((num_state_rows, mhc_mult), "float32"),
        sequences: T.Tensor((2, num_tokens), "int32"),
        out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        dilation: T.int32,
        walk_tokens: T.int32,
    ) -> None:
        num_walks = T.min(dilation, num_tokens) * T.ceildiv(num_tokens, dilation * walk_tokens)
        with T.Kernel(num_walks * (mhc_mult * num_tiles), threads=tile.threads) as block:
            weights = T.alloc_fragment((channels,), dtypes[0])
            taps = T.alloc_fragment((channels, 4), dtypes[1])
            f = [T.alloc_fragment((channels,), "float32") for _ in range(4)]
            rows = T.alloc_fragment((in_flight, channels), "bfloat16")
            rstds = T.alloc_fragment((in_flight,), "float32")
            starts = T.alloc_fragment((in_flight,), "int32")
            x, y = (T.alloc_fragment((channels,), "float32") for _ in range(2))
            before = [T.alloc_fragment((channels,), "float32") for _ in range(3)]
            result = T.alloc_fragment((channels,), "bfloat16")
            old = T.alloc_fragment((1, channels), "bfloat16")
            added = T.alloc_fragment((channels,), "bfloat16")
            one_row = channels_of_threads((channels,))
            T.annotate_layout(
                {fragment: channels_of_threads(fragment.shape) for fragment in (rows, old)}
                | dict.fromkeys((weights, *f, x, y, *before, result, added), one_row)
                | {taps: conv_tile.taps_layout(channels)}
            )
            stream = block // num_tiles % mhc_mult
            channel = block % num_tiles * channels
            # The last walks first: the end of u is still in L2 from the first pass.
            walk = num_walks - 1 - block // (mhc_mult * num_tiles)
            num_classes = T.min(dilation, num_tokens)
            first, count = (T.alloc_var("int32") for _ in range(2))
            first = walk // num_classes * (dilation * walk_tokens) + walk % num_classes
            count = T.min(walk_tokens, T.ceildiv(num_tokens - first, dilation))

            conv_tile.load_filter(norm_weight, conv_weight, stream, channel, weights, taps, f)
            T.clear(before[0])
            T.clear(before[1])
            T.clear(before[2])
            if first < num_tokens:
                for step in T.serial(T.ceildiv(count + 3, in_flight)):
                    for k in T.unroll(in_flight):
                        # Where there is no such token, another's row is read, and not used.
                        token = T.max(0, T.min(num_tokens - 1, first + (step * in_flight + k - 3) * dilation))
                        T.copy(u[token, stream, channel : channel + channels], rows[k, :])
                        rstds[k] = rstd[token, stream]
                        starts[k] = sequences[0, token] if is_packed else 0
                    for k in T.unroll(in_flight):
                        index = step * in_flight + k - 3
                        token = first + index * dilation
                        conv_tile.normalize(rows, k, rstds[k], x)
                        if index >= 0 and index < count:
                            if has_state:
                                sequence = sequences[1, token] if is_packed else 0
                                for tap, x_before in enumerate(before):
                                    # The state's row as far before its end as the tap is before the sequence's start.
                                    row_before = 3 * dilation + token - (tap + 1) * dilation - starts[k]
                                    if row_before < 3 * dilation:
                                        state_row = T.max(0, sequence * (3 * dilation) + row_before)
                                        T.copy(state[state_row, stream, channel : channel + channels], old[0, :])
                                        conv_tile.normalize(old, 0, state_rstd[state_row, stream], x_before)
                            is_there = [has_state or token - (tap + 1) * dilation >= starts[k] for tap in range(3)]
                            conv_tile.convolve(f, x, before, is_there, y)
                            if has_residual:
                                T.copy(residual[token, stream, channel : channel + channels], added)
                                conv_tile.silu_and_residual(y, rows, k, added, result)
                            else:
                                conv_tile.silu(y, result)
                            T.copy(result, out[token, stream, channel : channel + channels])
                        conv_tile.remember(before, x)

    return short_conv


@kernel(pass_configs=DIRECT_COPIES)
def _advance_state_kernel(mhc_mult: int, hidden: int, is_packed: bool, arch: Arch) -> Any:
    """A thread block has a few channels of one stream of a sequence; a thread reads and writes only its own."""
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import channels_of_threads

    tile, in_flight = ChannelTile.best(hidden), 8
    channels = tile.channels
    num_tokens, num_offsets, num_state_rows = (T.dynamic(f"num_{n}") for n in ("tokens", "offsets", "state_rows"))

    @T.prim_func
    def advance_state(
        u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        state: T.Tensor((num_state_rows, mhc_mult, hidden), "bfloat16"),
        length: T.int32,
    ) -> None:
        num_sequences = num_offsets - 1 if is_packed else 1
        with T.Kernel(num_sequences * (mhc_mult * tile.num_tiles), threads=tile.threads) as block:
            rows = T.alloc_fragment((in_flight, channels), "bfloat16")
            T.annotate_layout({rows: channels_of_threads(rows.shape)})
            stream = block // tile.num_tiles % mhc_mult
            channel = block % tile.num_tiles * channels
            sequence = block // (mhc_mult * tile.num_tiles)
            start, end = (T.alloc_var("int32") for _ in range(2))
            start = cu_seqlens[sequence] if is_packed else 0
            end = cu_seqlens[sequence + 1] if is_packed else num_tokens
            for step in T.serial(T.ceildiv(length, in_flight)):
                # Rows move to the front: those that a step overwrites, no later step reads.
                for k in T.unroll(in_flight):
                    moved = step * in_flight + k + end - start
                    if moved < length:
                        row = T.max(0, sequence * length + moved)
                        T.copy(state[row, stream, channel : channel + channels], rows[k, :])
                    else:
                        token = T.max(0, T.min(num_tokens - 1, start + moved - length))
                        T.copy(u[token, stream, channel : channel + channels], rows[k, :])
                for k in T.unroll(in_flight):
                    if step * in_flight + k < length:
                        row = sequence * length + step * in_flight + k
                        T.copy(rows[k, :], state[row, stream, channel : channel + channels])

    return advance_state


@op(writes=("state",), aligned=("u", "norm_weight", "conv_weight", "residual", "state"))
def short_conv(
    u: Tensor,
    norm_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """Causal convolution of width 4 over normalized tokens, and SiLU: SiLU(Σ_j w[j] · n[t - (3 - j) · dilation]).

    n = u · rsqrt(mean_H(u²) + eps) · norm_weight. With `residual` the result is SiLU(y) + u + residual, added from left
    to right. All in float32, rounded once; within one unit in the last place of bfloat16 of the reference, or 1e-6 of
    the largest value.
    A token sees only those of its sequence. It has the same bits in any batch, and whether it is decoded with a state
    or computed with the whole sequence at once.

    The state holds u itself, not n: the last 3 · dilation tokens of each sequence, the oldest first, zeros where there
    were none. n would have to be kept in float32, or be rounded once more than in a whole sequence; from u the same
    bits come again. A call reads it as the tokens before its own, then updates it in place.

    Source: ShortConv of the Engram demo, arXiv 2601.07372.

    Args:
        u: bfloat16 (T, m, H), contiguous; m is 1 to 8, H a multiple of 64, 64 to 16384.
        norm_weight: bfloat16 or float32 (m, H), contiguous.
        conv_weight: bfloat16 or float32 (m, H, 4), contiguous; the last tap is the token's own.
        dilation: tokens between taps, 1 to 65536.
        cu_seqlens: int32 (B + 1), contiguous, on the device of u: sequence b has tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. It ascends from 0 to T, which is checked with TK_DEBUG. None: one sequence.
        eps: positive; added to the mean square.
        residual: bfloat16 (T, m, H), contiguous, or None: SiLU(y) alone.
        state: bfloat16 (B, 3 · dilation, m, H), contiguous, updated in place, of no other argument's memory; B is 1
            without cu_seqlens. None: nothing comes before a sequence.

    Returns:
        bfloat16 (T, m, H).

    Raises:
        TypeError: an argument is not a tensor of its dtype, dilation not an int or eps not a number.
        ValueError: a shape, stride or device does not fit, or m, H, dilation or eps is out of range.
    """
    num_tokens, mhc_mult, hidden = check_conv(u, norm_weight, conv_weight, dilation, cu_seqlens, eps)
    dtypes, device = (torch.bfloat16,), u.device
    if residual is not None:
        check.tensor("residual", residual, dtypes, (num_tokens, mhc_mult, hidden), device=device)
    if state is not None:
        num_sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check.tensor("state", state, dtypes, (num_sequences, 3 * dilation, mhc_mult, hidden), device=device)
    out = new(u.new_empty, u.shape)
    if not launching(out):
        return out

    arch, num_sms = get_arch(device), get_num_sms(device)
    inputs, weights = (u, norm_weight, conv_weight, residual), (norm_weight.dtype, conv_weight.dtype)
    is_packed, has_residual = cu_seqlens is not None, residual is not None
    sequences = u.new_empty((2, num_tokens), dtype=torch.int32) if is_packed else None
    if state is None and takes_whole_rows(hidden, has_residual):
        rows = ConvRowsConfig.best(hidden, has_residual, arch)
        length = rows_walk_length(num_tokens, dilation, mhc_mult, num_sms * rows.min_blocks)
        if cu_seqlens is not None and sequences is not None:
            launch_sequences(cu_seqlens, sequences)
        convolve_rows = short_conv_rows_kernel(mhc_mult, hidden, weights, is_packed, has_residual, rows, arch)
        convolve_rows(*inputs, sequences, out, dilation, length, float(eps))
        return out

    rows_before = None if state is None else state.view(-1, mhc_mult, hidden)
    rstd = u.new_empty((num_tokens, mhc_mult), dtype=torch.float32)
    state_rstd = None if rows_before is None else u.new_empty(rows_before.shape[:2], dtype=torch.float32)
    launch_rstd(u, cu_seqlens, rows_before, float(eps), rstd, state_rstd, sequences)
    length = walk_length(num_tokens, mhc_mult * ChannelTile.best(hidden).num_tiles, num_sms)
    convolve = _short_conv_kernel(mhc_mult, hidden, weights, is_packed, has_residual, state is not None, arch)
    convolve(*inputs, rows_before, rstd, state_rstd, sequences, out, dilation, length)
    if rows_before is not None:
        advance_state = _advance_state_kernel(mhc_mult, hidden, is_packed, arch)
        advance_state(u, cu_seqlens, rows_before, 3 * dilation)
    return out
