"""Scores of logits in the gates' kernels.

    value = score(scoring_func, x)                     # not for softmax
    softmax_sums(x, sums)                              # for softmax: the row's maximum and sum, then
    value = softmax_score(x, sums)
    total = T.warp_reduce_sum(value)                   # with value = 0 in lanes without a slot
    weight = value / clamped(total) * factor

Every operation rounds as torch's does on the same device: accurate exponentials, IEEE divisions and square roots.
"""

from typing import Any

import tilelang.language as T

from tk_moe.device.gates import exp, fast_reciprocal
from tk_moe.lib.selection import expert_of, rank_of, sort_key
from tk_moe.scoring import LEAST_SUM, ScoringFunc


def score(scoring_func: ScoringFunc, x: Any) -> Any:
    """Score of the float32 logit `x`, an expression; for softmax the logit itself, which gives the same ranking."""
    if scoring_func is ScoringFunc.SIGMOID:
        return T.float32(1) / (T.float32(1) + exp(-x))
    if scoring_func is ScoringFunc.SQRTSOFTPLUS:
        return T.sqrt(T.if_then_else(x > T.float32(20), x, T.log1p(exp(x))))
    return x


@T.macro
def write_scores(scoring_func: ScoringFunc, x: T.Buffer, scores: T.Buffer) -> None:
    """scores[j] = score(x[j]). If a lane's logits are all within ±64, sigmoids take no branch, and so overlap.

    In that range nothing is infinite or subnormal, and an approximate reciprocal, corrected by two fused multiply-adds,
    has the bits of the division. A CUDA version took 2.14 µs with it, 2.56 without (H200, 128 tokens, 256 experts).
    """
    if scoring_func is ScoringFunc.SIGMOID:
        are_moderate = T.alloc_var("bool")
        are_moderate = True
        for j in T.unroll(x.shape[0]):
            are_moderate = are_moderate & (T.abs(x[j]) <= T.float32(64))  # `and` would branch
        if are_moderate:
            for j in T.unroll(x.shape[0]):
                divisor = T.float32(1) + exp(-x[j])
                approximate = fast_reciprocal(divisor)
                scores[j] = T.fma(approximate, T.fma(-divisor, approximate, T.float32(1)), approximate)
        else:
            for j in T.unroll(x.shape[0]):
                scores[j] = score(scoring_func, x[j])
    else:
        for j in T.unroll(x.shape[0]):
            scores[j] = score(scoring_func, x[j])


def slope(scoring_func: ScoringFunc, x: Any, value: Any) -> Any:
    """Derivative of the score of the float32 logit `x`, whose score is `value`, an expression; not for softmax."""
    if scoring_func is ScoringFunc.IDENTITY:
        return T.float32(1)
    if scoring_func is ScoringFunc.SIGMOID:
        return (T.float32(1) - value) * value
    # Where the score is 0 its slope is too: in the limit it is half the score.
    e = exp(x)
    of_softplus = T.if_then_else(x > T.float32(20), T.float32(1), e / (e + T.float32(1)))
    return T.if_then_else(value == T.float32(0), T.float32(0), of_softplus / (value + value))


def softmax_score(x: Any, sums: Any) -> Any:
    """Softmax score of the float32 logit `x`, an expression; `sums` comes from `softmax_sums`."""
    return exp(x - sums[0]) / sums[1]


def clamped(total: Any) -> Any:
    """max(total, 1e-20), an expression; NaN stays NaN."""
    return T.if_then_else(total < T.float32(LEAST_SUM), T.float32(LEAST_SUM), total)


@T.macro
def softmax_sums(x: T.Buffer, sums: T.Buffer) -> None:
    """Write sums = (max, Σ exp(x - max)) over a token's logits, the same in every lane, and replace x by exp(x - max).

    x float32 (per_lane,) in each lane of a warp, -∞ where the lane has no expert. Each lane adds its experts in order,
    then a butterfly reduction adds the lanes.
    """
    per_lane = int(x.shape[0])
    key = T.alloc_var("int32")
    sums[0] = x[0]
    for j in T.unroll(1, per_lane):
        sums[0] = T.max(sums[0], x[j])
    # For integers, one instruction finds the maximum of a warp, and sort keys have the order of the floats.
    key = sort_key(sums[0])
    key = T.warp_reduce_max(key)
    sums[0] = rank_of(key)
    sums[1] = T.float32(0)
    for j in T.unroll(per_lane):
        x[j] = exp(x[j] - sums[0])
        sums[1] = sums[1] + x[j]
    sums[1] = T.warp_reduce_sum(sums[1])


@T.macro
def load_logits(
    logits: T.Buffer, num_experts: int, vector: int, run_length: int, token: T.int32, lane: T.int32, x: T.Buffer
) -> None:
    """Load a lane's logits of a token into x as float32, -∞ where there is no expert.

    x[j] is the logit of expert_of(j, lane, run_length). The length of x and run_length are multiples of `vector`.
    """
    per_lane = int(x.shape[0])
    values = T.alloc_local((per_lane,), logits.dtype)
    for c in T.unroll(per_lane // vector):
        if expert_of(c * vector, lane, run_length) < num_experts:
            for v in T.vectorized(vector):
                values[c * vector + v] = logits[token, expert_of(c * vector, lane, run_length) + v]
    for j in T.unroll(per_lane):
        is_expert = expert_of(j, lane, run_length) < num_experts
        x[j] = T.if_then_else(is_expert, T.cast(values[j], "float32"), -T.infinity("float32"))
