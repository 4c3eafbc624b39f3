"""Rows of a few channels in registers: normalization, convolution over tokens and SiLU, with their gradients.

With x = u · rstd, the norm's weight is a factor of the filter: y[t] = Σ_j f[j] · x[t - (3 - j) · dilation] with
f[j] = conv_weight[j] · norm_weight. A tap is used only where `is_there` says that it is of the same sequence, so that
values of another sequence, NaN perhaps, change nothing.
"""

from typing import Any, NamedTuple

import tilelang.language as T


class Walk(NamedTuple):
    """Tokens that a thread block takes one after the other."""

    first: Any
    """The first token."""
    num_rows: Any
    """Rows to be read, with the three before the first token and any that follow the last one."""
    dilation: Any


class Saved(NamedTuple):
    """What earlier launches found out about each token; global memory."""

    rstd: Any
    sequences: Any
    means: Any
    """None where they are not needed."""


class Scalars(NamedTuple):
    """Of each row of a batch, in local buffers (batch,)."""

    rstds: Any
    starts: Any
    """First token of the row's sequence."""
    done_rstds: Any
    """Of the row three before it, as are the means."""
    done_means: Any


def taps_layout(channels: int) -> Any:
    """Layout of a fragment (channels, 4): a thread has all taps of eight neighbouring channels."""
    return T.Fragment((channels, 4), forward_fn=lambda i, j: (i // 8, i % 8 * 4 + j))


@T.macro
def find_sequence(cu_seqlens: T.Buffer, token: Any, sequences: T.Buffer) -> None:
    """sequences[:, token] = start and index of its sequence, which is the last b < B with cu_seqlens[b] ≤ token."""
    low, high = (T.alloc_var("int32") for _ in range(2))
    low = 0
    high = cu_seqlens.shape[0] - 2
    while low < high:
        if cu_seqlens[(low + high + 1) // 2] <= token:
            low = (low + high + 1) // 2
        else:
            high = (low + high + 1) // 2 - 1
    sequences[0, token] = cu_seqlens[low]
    sequences[1, token] = low


@T.macro
def fetch_rows(x: T.Buffer, shared: T.Buffer, walk: Walk, stream: Any, channel: Any, step: Any, batch: int) -> None:
    """Start copies of a batch of a walk's rows, each a group of its own, into a ring of rows of a few channels.

    Rows beyond the walk's, and those of no token, are zeros.
    """
    first, num_rows, dilation = walk
    for k in T.unroll(batch):
        row = step * batch + k
        token = T.alloc_var("int32")
        token = T.if_then_else(row < num_rows, first + (row - 3) * dilation, x.shape[0])
        T.async_copy(x[token, stream, channel : channel + shared.shape[1]], shared[row % shared.shape[0], :])


@T.macro
def load_scalars(
    saved: Saved, is_packed: bool, walk: Walk, stream: Any, step: Any, now: Scalars, later: Scalars
) -> None:
    """now = later; later = the scalars of the rows of a step's batch, loaded long before they are needed.

    Where there is no such token, another's are loaded.
    """
    first, dilation = walk.first, walk.dilation
    num_tokens, batch = saved.rstd.shape[0], later.rstds.shape[0]
    for i, each in enumerate(now):
        for k in T.unroll(batch):
            each[k] = later[i][k]
    for k in T.unroll(batch):
        row = step * batch + k
        token = T.alloc_var("int32")
        token = T.max(0, T.min(num_tokens - 1, first + (row - 3) * dilation))
        later.rstds[k] = saved.rstd[token, stream]
        if is_packed:
            later.starts[k] = saved.sequences[0, token]
        if saved.means is not None:
            done = T.alloc_var("int32")
            done = T.max(0, T.min(num_tokens - 1, first + (row - 6) * dilation))
            later.done_rstds[k] = saved.rstd[done, stream]
            later.done_means[k] = saved.means[done, stream]


@T.macro
def add_squares(rows: T.Buffer, r: Any, parts: T.Buffer) -> None:
    """parts[t] += the squares of the eight channels that thread t has of rows[r], one after the other."""
    for t in T.Parallel(parts.shape[0]):
        for j in T.unroll(8):
            value = T.cast(rows[r, t * 8 + j], "float32")
            parts[t] = T.fma(value, value, parts[t])


@T.macro
def load_filter(
    norm_weight: T.Buffer, conv_weight: T.Buffer, stream: Any, channel: Any, weights: T.Buffer, taps: T.Buffer, f: Any
) -> None:
    """f[j][i] = conv_weight[stream, channel + i, j] · norm_weight[stream, channel + i] in float32; 0 beyond hidden.

    `weights` (channels,) and `taps` (channels, 4) are fragments of the weights' dtypes, filled on the way.
    """
    channels = weights.shape[0]
    T.copy(norm_weight[stream, channel : channel + channels], weights)
    T.copy(conv_weight[stream, channel : channel + channels, :], taps)
    for j, factor in enumerate(f):
        for i in T.Parallel(channels):
            factor[i] = T.cast(taps[i, j], "float32") * T.cast(weights[i], "float32")


@T.macro
def normalize(rows: T.Buffer, k: Any, rstd: Any, x: T.Buffer) -> None:
    """x = rows[k] · rstd."""
    for i in T.Parallel(x.shape[0]):
        x[i] = T.cast(rows[k, i], "float32") * rstd


@T.macro
def convolve(f: Any, x: T.Buffer, before: Any, is_there: Any, y: T.Buffer) -> None:
    """y = f[0] · before[2] + f[1] · before[1] + f[2] · before[0] + f[3] · x, each sum rounded once, from left to right.

    before[k] is x of k + 1 dilations before, and counts as 0 unless is_there[k].
    """
    # Begun with 0, no sum is -0, so leaving a term out equals adding 0.
    if is_there[2]:
        for i in T.Parallel(x.shape[0]):
            y[i] = T.fma(f[0][i], before[2][i], T.float32(0))
    else:
        T.clear(y)
    for tap in (1, 0):
        if is_there[tap]:
            for i in T.Parallel(x.shape[0]):
                y[i] = T.fma(f[2 - tap][i], before[tap][i], y[i])
    for i in T.Parallel(x.shape[0]):
        y[i] = T.fma(f[3][i], x[i], y[i])


@T.macro
def remember(before: Any, x: T.Buffer) -> None:
    """Make x the latest of the rows before."""
    T.copy(before[1], before[2])
    T.copy(before[0], before[1])
    T.copy(x, before[0])


@T.macro
def sigmoid(y: Any) -> Any:
    """1 / (1 + exp(-y)) within some units in the last place, in four instructions."""
    return T.fast_rcp(T.float32(1) + T.__exp(-y))


@T.macro
def silu(y: T.Buffer, result: T.Buffer) -> None:
    """y becomes SiLU(y), and result the same, rounded."""
    for i in T.Parallel(y.shape[0]):
        y[i] = y[i] * sigmoid(y[i])
    T.copy(y, result)


@T.macro
def silu_and_residual(y: T.Buffer, rows: T.Buffer, k: Any, added: T.Buffer, result: T.Buffer) -> None:
    """y becomes SiLU(y) + rows[k] + added, added from left to right, and result the same, rounded."""
    for i in T.Parallel(y.shape[0]):
        y[i] = y[i] * sigmoid(y[i]) + T.cast(rows[k, i], "float32") + T.cast(added[i], "float32")
    T.copy(y, result)


@T.macro
def silu_gradient(grads: T.Buffer, k: Any, y: T.Buffer) -> None:
    """y becomes the gradient by y: grads[k] · s(1 + y(1 - s)), s = sigmoid(y)."""
    for i in T.Parallel(y.shape[0]):
        s = sigmoid(y[i])
        y[i] = T.cast(grads[k, i], "float32") * (s * T.fma(y[i], T.float32(1) - s, T.float32(1)))


@T.macro
def backpropagate(f: Any, d_y: T.Buffer, is_there: Any, pending: Any, d_x: T.Buffer) -> None:
    """Add the terms of d_y to the sums of the token and of those up to three dilations before, the last to d_x.

    `pending[k]` is the sum so far of k dilations before; that of three before is now complete, in d_x. d_x[t] =
    f[3] · d_y[t] + f[2] · d_y[t + d] + …, from left to right, with terms only of tokens that have t among their taps.
    """
    T.copy(pending[2], d_x)
    if is_there[2]:
        for i in T.Parallel(d_y.shape[0]):
            d_x[i] = T.fma(f[0][i], d_y[i], pending[2][i])
    T.copy(pending[1], pending[2])
    if is_there[1]:
        for i in T.Parallel(d_y.shape[0]):
            pending[2][i] = T.fma(f[1][i], d_y[i], pending[1][i])
    T.copy(pending[0], pending[1])
    if is_there[0]:
        for i in T.Parallel(d_y.shape[0]):
            pending[1][i] = T.fma(f[2][i], d_y[i], pending[0][i])
    for i in T.Parallel(d_y.shape[0]):
        pending[0][i] = f[3][i] * d_y[i]


@T.macro
def add_to_taps(d_y: T.Buffer, x: T.Buffer, before: Any, is_there: Any, sums: Any) -> None:
    """sums[j] += d_y · x of 3 - j dilations before, where that is of the same sequence."""
    for i in T.Parallel(x.shape[0]):
        sums[3][i] = T.fma(d_y[i], x[i], sums[3][i])
    for tap in (0, 1, 2):
        if is_there[tap]:
            for i in T.Parallel(x.shape[0]):
                sums[2 - tap][i] = T.fma(d_y[i], before[tap][i], sums[2 - tap][i])


@T.macro
def norm_gradient(d_x: T.Buffer, x: T.Buffer, rstd: Any, mean: Any) -> None:
    """d_x becomes the gradient by u: rstd · (d_x - x · mean)."""
    for i in T.Parallel(x.shape[0]):
        d_x[i] = rstd * (d_x[i] - x[i] * mean)


@T.macro
def add_row(rows: T.Buffer, k: Any, total: T.Buffer) -> None:
    """total += rows[k]."""
    for i in T.Parallel(total.shape[0]):
        total[i] = total[i] + T.cast(rows[k, i], "float32")
