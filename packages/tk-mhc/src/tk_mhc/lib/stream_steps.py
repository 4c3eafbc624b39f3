"""The collapse of streams and the post step, which separate ops and the fused ones have in common."""

from typing import Any

import tilelang.language as T


@T.macro
def collapse_streams(streams: T.Buffer, mix: T.Buffer, collapsed: T.Buffer) -> None:
    """collapsed[i] = Σ_s mix[s] · streams[s, i] in float32, one fused multiply-add a stream, ascending.

    `streams` is (m, channels), or (1, channels) where all streams are equal; `mix` is (m,).
    """
    T.clear(collapsed)
    for s in T.unroll(mix.shape[0]):
        for i in T.Parallel(streams.shape[1]):
            stream = T.cast(streams[T.min(s, streams.shape[0] - 1), i], "float32")
            collapsed[i] = T.fma(mix[s], stream, collapsed[i])


def mix_of(comb: Any, k: Any, n: Any, *token: Any) -> Any:
    """comb[k, n], of a token if comb has several; of the identity if there is no comb.

    Zeros of the identity are multiplied like any number: it gives the same bits as a comb, of infinities, too.
    """
    return T.if_then_else(k == n, T.float32(1), T.float32(0)) if comb is None else comb[(*token, k, n)]


@T.macro
def post_streams(x: T.Buffer, residual: T.Buffer, post: T.Buffer, comb: Any, new_streams: T.Buffer) -> None:
    """new_streams[n, i] = post[n] · x[i] + Σ_k comb[k, n] · residual[k, i] in float32, rounded once.

    The product with x is rounded, then comes one fused multiply-add a stream, ascending. All are fragments: x
    (block_channels,), residual and new_streams (m, block_channels), post (m,), comb (m, m), or None for the identity.
    """
    total = T.alloc_fragment((x.shape[0],), "float32")
    for n in T.unroll(residual.shape[0]):
        for i in T.Parallel(x.shape[0]):
            total[i] = post[n] * T.cast(x[i], "float32")
        for k in T.unroll(residual.shape[0]):
            for i in T.Parallel(x.shape[0]):
                total[i] = T.fma(mix_of(comb, k, n), T.cast(residual[k, i], "float32"), total[i])
        T.copy(total, new_streams[n, :])


@T.macro
def post_stream_of_tokens(
    x: T.Buffer, residual: T.Buffer, post: T.Buffer, comb: Any, stream: Any, new_stream: T.Buffer
) -> None:
    """One stream of `post_streams`, with the same bits, for several tokens.

    x and new_stream (tokens, channels) and residual (m, tokens, channels) are fragments, post (tokens, m) and comb
    (tokens, m, m), or None for the identity, lie in shared memory.
    """
    total = T.alloc_fragment(x.shape, "float32")
    for i, c in T.Parallel(*x.shape):
        total[i, c] = post[i, stream] * T.cast(x[i, c], "float32")
    for k in T.unroll(residual.shape[0]):
        for i, c in T.Parallel(*x.shape):
            total[i, c] = T.fma(mix_of(comb, k, stream, i), T.cast(residual[k, i, c], "float32"), total[i, c])
    T.copy(total, new_stream)
