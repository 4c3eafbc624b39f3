"""Tiles of the scores of several tokens for all experts; a warp holds the row of one token."""

from typing import Any

import tilelang.language as T

from tk_core.math import align


def experts_of_lanes(shape: tuple[int, int]) -> Any:
    """Layout of a fragment (tokens, experts): a warp per token, four consecutive experts of every 128 per lane."""
    return T.Fragment(shape, forward_fn=lambda t, e: (t * 32 + e // 4 % 32, e // 128 * 4 + e % 4))


@T.macro
def load_and_sum(scores: T.Buffer, fi: T.Buffer, first: Any, block_tokens: int) -> tuple[Any, ...]:
    """Load the scores of `block_tokens` tokens from `first` on, and return the fragments (values, factors, sums, dots).

    values (tokens, experts) has the scores, factors (tokens, experts) fi in each row, sums[t] = Σ_e scores[t, e] and
    dots[t] = Σ_e scores[t, e] · fi[e]. A lane adds its experts, ascending; then the lanes are added in a tree.
    (T.reduce_sum of a whole tile would choose the order within a lane by layout and architecture.)
    """
    num_experts = align(fi.shape[0], 128)
    values, factors = (T.alloc_fragment((block_tokens, num_experts), "float32") for _ in range(2))
    sums, dots = (T.alloc_fragment((block_tokens,), "float32") for _ in range(2))
    lane_sums, lane_dots = (T.alloc_fragment((block_tokens, 32), "float32") for _ in range(2))
    T.annotate_layout({x: experts_of_lanes(x.shape) for x in (values, factors)})
    T.copy(scores[first : first + block_tokens, 0:num_experts], values)
    for t, e in T.Parallel(block_tokens, num_experts):
        factors[t, e] = T.if_then_else(e < fi.shape[0], fi[e], T.float32(0))
    T.clear(lane_sums)
    T.clear(lane_dots)
    for t, lane in T.Parallel(block_tokens, 32):
        for i in T.unroll(num_experts // 32):
            e = (i // 4 * 32 + lane) * 4 + i % 4
            lane_sums[t, lane] = lane_sums[t, lane] + values[t, e]
            lane_dots[t, lane] = lane_dots[t, lane] + values[t, e] * factors[t, e]
    T.reduce_sum(lane_sums, sums, dim=1)
    T.reduce_sum(lane_dots, dots, dim=1)
    return values, factors, sums, dots
