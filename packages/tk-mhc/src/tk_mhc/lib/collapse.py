"""The collapse of streams, which a separate op and the fused ones have in common."""

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
