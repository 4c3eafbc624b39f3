"""Adding up the projection's splits in the kernel after it: in every op in the same order, so with the same bits."""

from typing import Any

import tilelang.language as T


def threads_per_token(num_tokens: int, num_columns: int, max_threads: int) -> Any:
    """Layout of a fragment (num_tokens, num_columns): up to max_threads threads share a token's columns evenly."""
    num_threads = max(n for n in range(1, max_threads + 1) if num_columns % n == 0)
    columns = num_columns // num_threads
    return T.Fragment((num_tokens, num_columns), forward_fn=lambda t, j: (t * num_threads + j // columns, j % columns))


@T.macro
def sum_partials(
    mul: T.Buffer,
    sqrsum: T.Buffer,
    first_token: Any,
    width: int | None,
    eps: Any,
    mixes: T.Buffer,
    rstd: T.Buffer,
    splits_in_flight: int,
) -> None:
    """mixes[t, j] = Σ_s mul[s, t, j] · rstd[t] and rstd[t] = rsqrt(Σ_s sqrsum[s, t] / width + eps), splits ascending.

    If width is None, mixes and rstd are just the two sums.
    `mixes`, a fragment (block_tokens, columns), takes as many of mul's columns as it has, from the first on; `rstd`
    (block_tokens,) is in shared memory. `splits_in_flight` splits at a time come through shared memory, so that their
    loads are in flight together; splits and tokens beyond the last count as zeros, which change no sum.
    """
    block_tokens, num_columns = mixes.shape
    products = T.alloc_shared((splits_in_flight, block_tokens, num_columns), "float32")
    squares = T.alloc_shared((splits_in_flight, block_tokens), "float32")
    square_sum = T.alloc_fragment((block_tokens,), "float32")
    T.clear(mixes)
    T.clear(square_sum)
    for chunk in T.serial(T.ceildiv(mul.shape[0], splits_in_flight)):
        split = chunk * splits_in_flight
        end_split, end_token = split + splits_in_flight, first_token + block_tokens
        T.copy(mul[split:end_split, first_token:end_token, 0:num_columns], products)
        T.copy(sqrsum[split:end_split, first_token:end_token], squares)
        for s in T.unroll(splits_in_flight):
            for t in T.Parallel(block_tokens):
                square_sum[t] += squares[s, t]
            for t, j in T.Parallel(block_tokens, num_columns):
                mixes[t, j] += products[s, t, j]
    if width is not None:
        for t in T.Parallel(block_tokens):
            square_sum[t] = T.rsqrt(square_sum[t] / T.float32(width) + eps)
    T.copy(square_sum, rstd)
    if width is not None:
        for t, j in T.Parallel(block_tokens, num_columns):
            mixes[t, j] = mixes[t, j] * rstd[t]
