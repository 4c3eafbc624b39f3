"""short_conv_bwd: gradients of `short_conv` by u and by both weights.

    x = u · rstd,  f[j] = conv_weight[j] · norm_weight,  y[t] = Σ_j f[j] · x[t - (3 - j) · d]
    d_y = d_out · s(1 + y(1 - s)),  s = sigmoid(y)
    d_x[t] = Σ_j f[j] · d_y[t + (3 - j) · d]
    d_u = bf16(rstd · (d_x - x · mean_H(d_x · x)) [+ d_out])
    d_f[j] = Σ_t d_y[t] · x[t - (3 - j) · d]
    d_conv_weight[j] = norm_weight · d_f[j],  d_norm_weight = Σ_j conv_weight[j] · d_f[j]

in float32, for each stream and, but for the means, each channel on its own. Taps of other sequences are left out.

Thread blocks walk over tokens as those of `short_conv` do (see `lib/conv.py`), three dilations behind with d_x:

    token t - 3d    x in registers; d_x complete once d_y[t] is known
    token t - 2d    x and what d_x has so far in registers
    token t - d     x and what d_x has so far in registers
    token t         y, d_y

The mean of d_x · x needs all channels of a row, for which an SM's registers do not suffice with all of this.
So there are two passes over u and d_out, and five launches:

    rstd            of all rows
    sums            d_f of ranges of tokens, and Σ d_x · x of the channels of each warp
    weights         d_f of all ranges added up, ascending, and both gradients from it
    means           Σ d_x · x of a row's warps added up, ascending
    d_u             d_x once more

The number of ranges depends on m and H alone, so the bits are the same at any number of SMs.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_engram.conv.short_conv import walk_length
from tk_engram.lib.conv import ChannelTile, check_conv, launch_rstd

_BATCH, _AHEAD = 2, 3
"""Rows of a step, of u and of d_out each, and steps whose rows are in flight to shared memory: 24 KB of a thread block,
of which an SM's registers hold two or three. m 4, H 7168, 8192 tokens on an H200: 1105 to 1125 µs with batches of 2 or
4 and 1 to 5 of them ahead, 1261 to 1277 with batches of 1."""


def num_ranges_of(mhc_mult: int, hidden: int) -> int:
    """Ranges of tokens that are summed separately, which decide the bits of d_f: the same on every architecture.

    As many as make about 784 thread blocks, 28 for m 4, H 7168; at most 128.
    """
    return min(128, ceil_div(784, mhc_mult * ChannelTile.best(hidden).num_tiles))


@kernel(pass_configs=DIRECT_COPIES)
def _walk_kernel(
    mhc_mult: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    is_packed: bool,
    has_residual: bool,
    sums_only: bool,
    arch: Arch,
) -> Any:
    """`sums_only`: write d_f and the parts of the means, otherwise d_u. `dtypes`: of norm_weight and conv_weight."""
    import tilelang.language as T

    from tk_engram.lib import conv_tile
    from tk_engram.lib.gate_tiles import channels_of_threads

    tile, batch, ahead = ChannelTile.best(hidden), _BATCH, _AHEAD
    groups = 2 * batch  # of a step: each copy is one
    # With the residual's gradient, three rows of d_out stay until d_u is complete.
    slots = batch * (1 + ahead) + 3 * has_residual
    channels, num_tiles, warps, num_ranges = tile.channels, tile.num_tiles, tile.warps, num_ranges_of(mhc_mult, hidden)
    num_parts = num_tiles * warps
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def short_conv_bwd(
        u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        norm_weight: T.Tensor((mhc_mult, hidden), dtypes[0]),
        conv_weight: T.Tensor((mhc_mult, hidden, 4), dtypes[1]),
        rstd: T.Tensor((num_tokens, mhc_mult), "float32"),
        sequences: T.Tensor((2, num_tokens), "int32"),
        means: T.Tensor((num_tokens, mhc_mult), "float32"),
        d_f: T.Tensor((num_ranges, mhc_mult, 4, hidden), "float32"),
        parts: T.Tensor((num_tokens, mhc_mult, num_parts), "float32"),
        d_u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        dilation: T.int32,
        walk_tokens: T.int32,
    ) -> None:
        # Tokens of a range, whose walks one thread block takes in turn, or of neighbouring walks, a thread block each.
        range_tokens = T.ceildiv(num_tokens, num_ranges) if sums_only else dilation * walk_tokens
        num_classes = T.min(dilation, num_tokens)
        num_pieces = num_ranges if sums_only else num_classes * T.ceildiv(num_tokens, range_tokens)
        with T.Kernel(num_pieces * (mhc_mult * num_tiles), threads=tile.threads) as block:
            weights = T.alloc_fragment((channels,), dtypes[0])
            taps = T.alloc_fragment((channels, 4), dtypes[1])
            f = [T.alloc_fragment((channels,), "float32") for _ in range(4)]
            before = [T.alloc_fragment((channels,), "float32") for _ in range(3)]
            pending = [T.alloc_fragment((channels,), "float32") for _ in range(3)]
            sums = [T.alloc_fragment((channels,), "float32") for _ in range(4)]
            u_ring = T.alloc_shared((slots, channels), "bfloat16")
            d_out_ring = T.alloc_shared((slots, channels), "bfloat16")
            rows, grads = (T.alloc_fragment((1, channels), "bfloat16") for _ in range(2))
            scalars = ("float32", "int32", "float32", "float32")
            now, later = [conv_tile.Scalars(*[T.alloc_local((batch,), dtype) for dtype in scalars]) for _ in range(2)]
            x, y, d_x = (T.alloc_fragment((channels,), "float32") for _ in range(3))
            products = T.alloc_fragment((warps, 256), "float32")
            dots = T.alloc_fragment((warps,), "float32")
            result = T.alloc_fragment((channels,), "bfloat16")
            one_row = channels_of_threads((channels,))
            T.annotate_layout(
                dict.fromkeys((weights, *f, *before, *pending, *sums, x, y, d_x, result), one_row)
                | {fragment: channels_of_threads(fragment.shape) for fragment in (rows, grads)}
                | {
                    products: T.Fragment((warps, 256), lambda w, i: (w * 32 + i // 8, i % 8)),
                    taps: conv_tile.taps_layout(channels),
                }
            )
            stream = block // num_tiles % mhc_mult
            channel = block % num_tiles * channels
            piece = block // (mhc_mult * num_tiles)
            first, count, num_walks = (T.alloc_var("int32") for _ in range(3))
            num_walks = T.min(dilation, range_tokens) if sums_only else 1

            conv_tile.load_filter(norm_weight, conv_weight, stream, channel, weights, taps, f)
            saved = conv_tile.Saved(rstd, sequences, None if sums_only else means)
            for fragment in (*before, *pending, *sums, *now, *later):
                T.clear(fragment)
            for walk_index in T.serial(num_walks):
                if sums_only:
                    first = piece * range_tokens + walk_index
                    end = T.min((piece + 1) * range_tokens, num_tokens)
                    count = T.max(0, T.ceildiv(end - first, dilation))
                else:
                    first = piece // num_classes * range_tokens + piece % num_classes
                    count = T.max(0, T.min(walk_tokens, T.ceildiv(num_tokens - first, dilation)))
                # Three rows before the walk's own, for y, and three after them, for d_x.
                walk = conv_tile.Walk(first, count + 6, dilation)
                for step in T.unroll(ahead):
                    conv_tile.fetch_rows(u, u_ring, walk, stream, channel, step, batch)
                    conv_tile.fetch_rows(d_out, d_out_ring, walk, stream, channel, step, batch)
                conv_tile.load_scalars(saved, is_packed, walk, stream, 0, now, later)
                for step in T.serial(T.if_then_else(count > 0, T.ceildiv(count + 6, batch), 0)):
                    T.ptx_wait_group(groups * (ahead - 1))
                    conv_tile.fetch_rows(u, u_ring, walk, stream, channel, step + ahead, batch)
                    conv_tile.fetch_rows(d_out, d_out_ring, walk, stream, channel, step + ahead, batch)
                    conv_tile.load_scalars(saved, is_packed, walk, stream, step + 1, now, later)
                    for k in T.unroll(batch):
                        index = step * batch + k - 3
                        token = first + index * dilation
                        T.copy(u_ring[(step * batch + k) % slots, :], rows[0, :])
                        T.copy(d_out_ring[(step * batch + k) % slots, :], grads[0, :])
                        start = now.starts[k] if is_packed else 0
                        is_there = [token < num_tokens and token - (tap + 1) * dilation >= start for tap in range(3)]
                        conv_tile.normalize(rows, 0, now.rstds[k], x)
                        conv_tile.convolve(f, x, before, is_there, y)
                        conv_tile.silu_gradient(grads, 0, y)
                        conv_tile.backpropagate(f, y, is_there, pending, d_x)
                        if sums_only:
                            if index >= 0 and index < count:
                                conv_tile.add_to_taps(y, x, before, is_there, sums)
                            if index >= 3 and index < count + 3:
                                for w, i in T.Parallel(warps, 256):
                                    products[w, i] = d_x[w * 256 + i] * before[2][w * 256 + i]
                                T.reduce_sum(products, dots, dim=1)
                                for w in T.Parallel(warps):
                                    parts[token - 3 * dilation, stream, block % num_tiles * warps + w] = dots[w]
                        elif index >= 3 and index < count + 3:
                            conv_tile.norm_gradient(d_x, before[2], now.done_rstds[k], now.done_means[k])
                            if has_residual:
                                T.copy(d_out_ring[(step * batch + k + slots - 3) % slots, :], grads[0, :])
                                conv_tile.add_row(grads, 0, d_x)
                            T.copy(d_x, result)
                            T.copy(result, d_u[token - 3 * dilation, stream, channel : channel + channels])
                        conv_tile.remember(before, x)
                T.ptx_wait_group(0)
            if sums_only:
                for j, total in enumerate(sums):
                    T.copy(total, d_f[piece, stream, j, channel : channel + channels])

    return short_conv_bwd


_SUM_THREADS = 128
_RANGES_IN_FLIGHT = 4


@kernel(pass_configs=DIRECT_COPIES)
def _weights_kernel(mhc_mult: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], arch: Arch) -> Any:
    """A thread adds up one channel's d_f. `dtypes`: of norm_weight and conv_weight."""
    import tilelang.language as T

    num_ranges = num_ranges_of(mhc_mult, hidden)
    in_flight = max(n for n in range(1, _RANGES_IN_FLIGHT + 1) if num_ranges % n == 0)

    @T.prim_func
    def weights(
        d_f: T.Tensor((num_ranges, mhc_mult, 4, hidden), "float32"),
        norm_weight: T.Tensor((mhc_mult, hidden), dtypes[0]),
        conv_weight: T.Tensor((mhc_mult, hidden, 4), dtypes[1]),
        d_norm_weight: T.Tensor((mhc_mult, hidden), "float32"),
        d_conv_weight: T.Tensor((mhc_mult, hidden, 4), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(hidden, _SUM_THREADS), mhc_mult, threads=_SUM_THREADS) as (block, stream):
            channel = block * _SUM_THREADS
            parts = T.alloc_fragment((in_flight, 4, _SUM_THREADS), "float32")
            sums = T.alloc_fragment((_SUM_THREADS, 4), "float32")
            norm = T.alloc_fragment((_SUM_THREADS,), "float32")
            T.annotate_layout(
                {
                    parts: T.Fragment(parts.shape, lambda r, j, i: (i, r * 4 + j)),
                    sums: T.Fragment(sums.shape, lambda i, j: (i, j)),
                    norm: T.Fragment(norm.shape, lambda i: (i, 0)),
                }
            )
            T.clear(sums)
            for step in T.serial(num_ranges // in_flight):
                first = step * in_flight
                T.copy(d_f[first : first + in_flight, stream, :, channel : channel + _SUM_THREADS], parts)
                for r in T.unroll(in_flight):
                    for i, j in T.Parallel(_SUM_THREADS, 4):
                        sums[i, j] = sums[i, j] + parts[r, j, i]
            T.clear(norm)
            for j in T.unroll(4):
                for i in T.Parallel(_SUM_THREADS):
                    if channel + i < hidden:
                        weight = T.cast(conv_weight[stream, channel + i, j], "float32")
                        norm[i] = T.fma(weight, sums[i, j], norm[i])
            for i, j in T.Parallel(_SUM_THREADS, 4):
                if channel + i < hidden:
                    weight = T.cast(norm_weight[stream, channel + i], "float32")
                    d_conv_weight[stream, channel + i, j] = weight * sums[i, j]
            T.copy(norm, d_norm_weight[stream, channel : channel + _SUM_THREADS])

    return weights


@kernel(pass_configs=DIRECT_COPIES)
def _means_kernel(num_parts: int, hidden: int, arch: Arch) -> Any:
    """A thread adds up one row's parts."""
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def means(
        parts: T.Tensor((num_rows, num_parts), "float32"),
        row_means: T.Tensor((num_rows,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, _SUM_THREADS), threads=_SUM_THREADS) as block:
            first = block * _SUM_THREADS
            row_parts = T.alloc_fragment((_SUM_THREADS, num_parts), "float32")
            sums = T.alloc_fragment((_SUM_THREADS,), "float32")
            T.annotate_layout({row_parts: T.Fragment(row_parts.shape, lambda r, p: (r, p))})
            T.copy(parts[first : first + _SUM_THREADS, :], row_parts)
            T.clear(sums)
            for p in T.unroll(num_parts):
                for r in T.Parallel(_SUM_THREADS):
                    sums[r] = sums[r] + row_parts[r, p]
            for r in T.Parallel(_SUM_THREADS):
                sums[r] = sums[r] / T.float32(hidden)
            T.copy(sums, row_means[first : first + _SUM_THREADS])

    return means


@op(aligned=("d_out", "u", "norm_weight", "conv_weight"))
def short_conv_bwd(
    d_out: Tensor,
    u: Tensor,
    norm_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-5,
    has_residual: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `short_conv` without a state, by u, norm_weight and conv_weight.

    d_y = d_out · s(1 + y(1 - s)) with s = sigmoid(y); d_conv_weight[j] = Σ_t d_y[t] · n[t - (3 - j) · dilation];
    d_n[t] = Σ_j w[j] · d_y[t + (3 - j) · dilation]; d_norm_weight = Σ_t d_n · x with x = u · rstd, d_x = d_n ·
    norm_weight; d_u = rstd · (d_x - x · mean_H(d_x · x)), plus d_out with a residual. All in float32. d_u is rounded
    once, and a token's bits are the same in any batch. The sums over tokens are taken in ranges whose number depends
    on m and H alone, so their bits are the same at any number of SMs. Against the reference calc_diff is below 1e-8
    for the weights; d_u is within one unit in the last place of bfloat16, or 1e-6 of its largest value.

    Args:
        d_out: the gradient by the result, bfloat16 (T, m, H), contiguous. It is that by `residual`, too.
        u: bfloat16 (T, m, H), contiguous; m is 1 to 8, H a multiple of 64, 64 to 16384.
        norm_weight: bfloat16 or float32 (m, H), contiguous.
        conv_weight: bfloat16 or float32 (m, H, 4), contiguous.
        dilation: tokens between taps, 1 to 65536.
        cu_seqlens: int32 (B + 1), contiguous, on the device of u, as the forward was given it; None: one sequence.
        eps: as the forward was given it.
        has_residual: whether the forward was given a residual, and so added u.

    Returns:
        (d_u, d_norm_weight, d_conv_weight): bfloat16 (T, m, H), float32 (m, H) and float32 (m, H, 4); of no tokens the
        last two are zeros.

    Raises:
        TypeError: an argument is not a tensor of its dtype, dilation not an int, eps not a number or has_residual not
            a bool.
        ValueError: a shape, stride or device does not fit, or m, H, dilation or eps is out of range.
    """
    shape = check_conv(u, norm_weight, conv_weight, dilation, cu_seqlens, eps)
    check.tensor("d_out", d_out, (torch.bfloat16,), shape, device=u.device)
    check.flag("has_residual", has_residual)
    d_u = new(u.new_empty, u.shape)
    d_norm_weight = new(u.new_empty, norm_weight.shape, dtype=torch.float32)
    d_conv_weight = new(u.new_empty, conv_weight.shape, dtype=torch.float32)
    gradients = d_u, d_norm_weight, d_conv_weight
    if not launching(*gradients):
        return gradients
    num_tokens, mhc_mult, hidden = shape
    if num_tokens == 0:
        d_norm_weight.zero_()
        d_conv_weight.zero_()
        return gradients

    tile, arch, is_packed = ChannelTile.best(hidden), get_arch(u.device), cu_seqlens is not None
    num_ranges, num_parts = num_ranges_of(mhc_mult, hidden), tile.num_tiles * tile.warps
    length = walk_length(num_tokens, mhc_mult * tile.num_tiles, get_num_sms(u.device))
    rstd, means = (d_norm_weight.new_empty((num_tokens, mhc_mult)) for _ in range(2))
    sequences = u.new_empty((2, num_tokens), dtype=torch.int32)
    launch_rstd(u, cu_seqlens, None, float(eps), rstd, None, sequences)

    weights, dtypes = (norm_weight, conv_weight), (norm_weight.dtype, conv_weight.dtype)
    inputs = (u, d_out, *weights, rstd, sequences)
    d_f = d_norm_weight.new_empty((num_ranges, mhc_mult, 4, hidden))
    parts = d_norm_weight.new_empty((num_tokens, mhc_mult, num_parts))
    add_up = _walk_kernel(mhc_mult, hidden, dtypes, is_packed, False, True, arch)
    add_up(*inputs, None, d_f, parts, None, dilation, length)
    _weights_kernel(mhc_mult, hidden, dtypes, arch)(d_f, *weights, d_norm_weight, d_conv_weight)
    _means_kernel(num_parts, hidden, arch)(parts.view(-1, num_parts), means.view(-1))
    differentiate = _walk_kernel(mhc_mult, hidden, dtypes, is_packed, has_residual, False, arch)
    differentiate(*inputs, means, None, None, d_u, dilation, length)
    return gradients
