"""Tiles of all experts' scores, a warp for each token."""

from typing import Any

import tilelang.language as T


def experts_of_lanes(shape: tuple[int, int]) -> Any:
    """Layout of a fragment (tokens, experts): a warp per token, four consecutive experts of every 128 per lane."""
    return T.Fragment(shape, forward_fn=lambda t, e: (t * 32 + e // 4 % 32, e // 128 * 4 + e % 4))


@T.macro
def sum_scores(scores: T.Buffer, factors: T.Buffer, sums: T.Buffer, dots: T.Buffer) -> None:
    """sums[t] = Σ_e scores[t, e], dots[t] = Σ_e scores[t, e] · factors[t, e]; both tiles as `experts_of_lanes` says.

    A lane adds its experts, ascending; then the lanes are added in a tree. (T.reduce_sum of a whole tile would choose
    the order within a lane by layout and architecture.)
    """
    block_tokens, num_experts = scores.shape
    lane_sums = T.alloc_fragment((block_tokens, 32), "float32")
    lane_dots = T.alloc_fragment((block_tokens, 32), "float32")
    T.clear(lane_sums)
    T.clear(lane_dots)
    for t, lane in T.Parallel(block_tokens, 32):
        for i in T.unroll(num_experts // 32):
            e = (i // 4 * 32 + lane) * 4 + i % 4
            lane_sums[t, lane] = lane_sums[t, lane] + scores[t, e]
            lane_dots[t, lane] = lane_dots[t, lane] + scores[t, e] * factors[t, e]
    T.reduce_sum(lane_sums, sums, dim=1)
    T.reduce_sum(lane_dots, dots, dim=1)
