"""From raw mixes to the weights of streams: what the separate ops and the fused ones have in common.

A thread has all numbers of its token in registers, so every sum over streams is a plain ascending loop of one thread:
its bits are the same in every kernel, whatever the number of tokens and threads of a thread block.
"""

from typing import Any

import tilelang.language as T


def token_per_thread(shape: tuple[int, ...]) -> Any:
    """Layout of a fragment (tokens, ...) in which thread t has all elements of token t; any further threads idle."""

    def thread_and_register(token: Any, *indices: Any) -> tuple[Any, Any]:
        register: Any = 0
        for index, size in zip(indices, shape[1:], strict=True):
            register = register * size + index
        return token, register

    return T.Fragment(shape, forward_fn=thread_and_register)


@T.macro
def sigmoid(z: Any) -> Any:
    """1 / (1 + exp(-z)), with an IEEE division."""
    return T.float32(1) / (T.float32(1) + T.exp(-z))


@T.macro
def reciprocal(s: Any) -> Any:
    """1 / s to a little over half a unit in the last place, for a normal s, without an IEEE division's branches."""
    r = T.fast_rcp(s)
    return T.fma(r, T.fma(-s, r, T.float32(1)), r)


@T.macro
def split_mixes(
    mixes: T.Buffer,
    scale: T.Buffer,
    base: T.Buffer,
    pre: T.Buffer,
    post: T.Buffer,
    comb: Any,
    post_mult_value: Any,
    pre_eps: Any,
    post_eps: Any,
) -> None:
    """mixes become z = mixes · scale of their group + base.

    pre = sigmoid(z) + pre_eps, post = sigmoid(z) · post_mult_value, and + post_eps unless that is None, and comb = z.
    `mixes` (tokens, m·(m + 2)), `pre` and `post` (tokens, m) and `comb` (tokens, m, m) are fragments with a token per
    thread, `scale` (3) and `base` (m·(m + 2)) global tensors; without comb there are 2m mixes of two groups.
    """
    num_tokens, mhc_mult = pre.shape
    for row in T.unroll(mixes.shape[1] // mhc_mult):
        for t, i in T.Parallel(num_tokens, mhc_mult):
            k = row * mhc_mult + i
            mixes[t, k] = mixes[t, k] * scale[T.min(row, 2)] + base[k]
    for t, i in T.Parallel(num_tokens, mhc_mult):
        pre[t, i] = sigmoid(mixes[t, i]) + pre_eps
    for t, i in T.Parallel(num_tokens, mhc_mult):
        post[t, i] = sigmoid(mixes[t, mhc_mult + i]) * post_mult_value
    if post_eps is not None:
        for t, i in T.Parallel(num_tokens, mhc_mult):
            post[t, i] += post_eps
    if comb is not None:
        for t, i, j in T.Parallel(num_tokens, mhc_mult, mhc_mult):
            comb[t, i, j] = mixes[t, (2 + i) * mhc_mult + j]


@T.macro
def sinkhorn(comb: T.Buffer, repeat: int, eps: Any) -> None:
    """Softmax of each row, plus eps; then columns and rows in turn are divided by their sums plus eps, columns last.

    `comb` (tokens, m, m) is a fragment with a token per thread. Each division is a product with the reciprocal.
    """
    factors = T.alloc_fragment(comb.shape[:2], "float32")
    softmax_plus_eps(comb, factors, eps)
    divide(comb, factors, eps, is_row=False)
    for _ in T.serial(repeat - 1):
        divide(comb, factors, eps, is_row=True)
        divide(comb, factors, eps, is_row=False)


@T.macro
def softmax(comb: T.Buffer, factors: T.Buffer) -> None:
    """Softmax of each row."""
    num_tokens, mhc_mult, _ = comb.shape
    for t, i in T.Parallel(num_tokens, mhc_mult):
        factors[t, i] = comb[t, i, 0]
    for j in T.unroll(1, mhc_mult):
        for t, i in T.Parallel(num_tokens, mhc_mult):
            factors[t, i] = T.max(factors[t, i], comb[t, i, j])
    for t, i, j in T.Parallel(num_tokens, mhc_mult, mhc_mult):
        comb[t, i, j] = T.exp(comb[t, i, j] - factors[t, i])
    divide(comb, factors, T.float32(0), is_row=True)


@T.macro
def softmax_plus_eps(comb: T.Buffer, factors: T.Buffer, eps: Any) -> None:
    """Softmax of each row, plus eps."""
    softmax(comb, factors)
    for t, i, j in T.Parallel(*comb.shape):
        comb[t, i, j] += eps


def entry(t: Any, line: Any, k: Any, is_row: bool) -> tuple[Any, Any, Any]:
    """Indices of number k in a row, or else a column, of token t."""
    return (t, line, k) if is_row else (t, k, line)


@T.macro
def divide(comb: T.Buffer, factors: T.Buffer, eps: Any, is_row: bool) -> None:
    """Divide each row, or else each column, by its sum plus eps; the reciprocals of these stay in `factors`."""
    num_tokens, mhc_mult, _ = comb.shape
    for t, line in T.Parallel(num_tokens, mhc_mult):
        factors[t, line] = comb[entry(t, line, 0, is_row)]
    for k in T.unroll(1, mhc_mult):
        for t, line in T.Parallel(num_tokens, mhc_mult):
            factors[t, line] += comb[entry(t, line, k, is_row)]
    for t, line in T.Parallel(num_tokens, mhc_mult):
        factors[t, line] = reciprocal(factors[t, line] + eps)
    scale_lines(comb, factors, is_row)


@T.macro
def scale_lines(comb: T.Buffer, factors: T.Buffer, is_row: bool) -> None:
    """Multiply each row, or else each column, by its factor."""
    for t, i, j in T.Parallel(*comb.shape):
        comb[t, i, j] *= factors[t, i if is_row else j]
