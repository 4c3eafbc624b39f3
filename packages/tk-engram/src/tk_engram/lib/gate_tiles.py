"""Tiles of channels, sums over a thread block, which the convolution uses too, and gradients of the gate."""

from typing import Any, NamedTuple

import tilelang.language as T

from tk_core.tiles import VECTOR


class Saved(NamedTuple):
    """What the forward saved of a token's stream."""

    dot: Any
    gate: Any
    rstd_x: Any
    rstd_k: Any


class Inputs(NamedTuple):
    """Fragments (channels,) of a token's stream."""

    grad_out: Any
    x: Any
    k: Any
    weight: Any


class Gradients(NamedTuple):
    """Fragments (channels,); that by the weight (streams, rounds, channels)."""

    x: Any
    k: Any
    weight: Any


def channels_of_threads(shape: tuple[int, ...]) -> Any:
    """Layout of a fragment (..., channels) in which each thread has eight neighbouring channels of every row."""

    def thread_and_register(*indices: Any) -> tuple[Any, Any]:
        row: Any = 0
        for index, size in zip(indices[:-1], shape[:-1], strict=True):
            row = row * size + index
        return indices[-1] // VECTOR, row * VECTOR + indices[-1] % VECTOR

    return T.Fragment(shape, forward_fn=thread_and_register)


def pairs_of_threads(shape: tuple[int, int], threads: int) -> Any:
    """Layout of a fragment (pairs, channels): consecutive threads hold eight channels each, pair after pair."""

    def thread_and_register(pair: Any, channel: Any) -> tuple[Any, Any]:
        vectors = (pair * shape[1] + channel) // VECTOR
        return vectors % threads, vectors // threads * VECTOR + channel % VECTOR

    return T.Fragment(shape, forward_fn=thread_and_register)


@T.macro
def sum_over_threads(partials: tuple[T.Buffer, ...], totals: T.Buffer) -> None:
    """totals[i] = Σ_t partials[i][t], known to every thread: by shuffles within warps, then warp by warp.

    `partials` are n fragments (threads,), `totals` is a local buffer (n,). Any whole number of warps.
    """
    num_warps = partials[0].shape[0] // 32
    shared_sums = T.alloc_shared((len(partials), num_warps), "float32")
    for i, partial in enumerate(partials):
        lanes = T.reshape(partial, (num_warps, 32))
        warp_sums = T.alloc_fragment((num_warps,), "float32")
        T.reduce_sum(lanes, warp_sums, dim=1)
        T.copy(warp_sums, shared_sums[i, :])
    for i in T.unroll(len(partials)):
        totals[i] = T.float32(0)
        for warp in T.unroll(num_warps):
            totals[i] = totals[i] + shared_sums[i, warp]


@T.macro
def gate_factors(score_grad: Any, saved: Saved, clamp_value: Any, hidden: int, factors: T.Buffer) -> None:
    """The backward's factors of the channels of a token's stream, to a local buffer (4,).

    The gate; a, the gradient by dot; those by the mean squares of x and of k, times the 2 / H of their derivatives.
    `score_grad`: Σ grad_out · v.
    """
    dot, gate, rstd_x, rstd_k = saved
    d = dot * rstd_x * rstd_k * T.float32(hidden**-0.5)
    magnitude = T.abs(d)
    factors[0] = gate
    factors[1] = T.float32(0)
    if T.And(magnitude > T.float32(0), magnitude >= clamp_value):
        factors[1] = score_grad * gate * (T.float32(1) - gate) * T.float32(0.5) * T.rsqrt(magnitude)
    factors[2] = factors[1] * d * T.float32(-1 / hidden) * rstd_x * rstd_x
    factors[3] = factors[1] * d * T.float32(-1 / hidden) * rstd_k * rstd_k
    factors[1] = factors[1] * rstd_x * rstd_k * T.float32(hidden**-0.5)


@T.macro
def stream_gradients(
    inputs: Inputs, factors: T.Buffer, is_image: Any, add_residual: bool, gradients: Gradients, s: Any, r: Any
) -> None:
    """Gradients by x and k for one round of channels; those by the weight are added to its stream s, round r.

    `is_image`: whether the token is masked, None without a mask.
    """
    grads, xs, ks, ws = inputs
    x_grads, k_grads, w_grads = gradients
    # One by one: TileLang would have sm_100 multiply and add in pairs, and nvcc run out of registers.
    for t in T.Parallel(xs.shape[0] // VECTOR):
        for j in T.unroll(VECTOR):
            i = t * VECTOR + j
            grad = T.cast(grads[i], "float32") if add_residual else T.float32(0)
            x, k = T.cast(xs[i], "float32"), T.cast(ks[i], "float32")
            scaled = factors[1] * ws[i]
            x_grad = T.fma(scaled, k, T.fma(factors[2], x, grad))
            k_grad = T.fma(scaled, x, factors[3] * k)
            w_grad = T.fma(factors[1] * x, k, w_grads[s, r, i])
            if is_image is None:
                x_grads[i] = x_grad
                k_grads[i] = k_grad
                w_grads[s, r, i] = w_grad
            else:
                # Also where x, k or v are not finite.
                x_grads[i] = T.Select(is_image, grad, x_grad)
                k_grads[i] = T.Select(is_image, T.float32(0), k_grad)
                w_grads[s, r, i] = T.Select(is_image, w_grads[s, r, i], w_grad)
