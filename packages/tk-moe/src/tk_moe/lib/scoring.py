"""ScoringFunc: how a gate's logits become scores; and the code for it that the gates' kernels share.

sigmoid        1 / (1 + exp(-x))
sqrtsoftplus   sqrt(log(1 + exp(x))), where the logarithm is replaced by x for x above 20
softmax        exp(x - max) / Σ exp(x - max), over the experts of a token
identity       x

In a kernel:

    value = score(scoring_func, x)                     # not for softmax
    softmax_sums_macro(per_lane)(x, sums)              # for softmax: the row's maximum and sum, then
    value = softmax_score(x, sums)
    total = T.warp_reduce_sum(value)                   # with value = 0 in lanes without a slot
    weight = value / clamped(total) * factor

Every operation rounds as torch's does on the same device: accurate exponentials, IEEE divisions and square roots.
"""

import enum
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_moe.device import scoring
from tk_moe.lib.selection import expert_of, rank_of, sort_key

__all__ = ["ScoringFunc"]


class ScoringFunc(enum.IntEnum):
    """How logits become scores. Its str() is the lower-case name; numbers and names are those of TileKernels 1.0.0."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_str(cls, label: str) -> "ScoringFunc":
        """The member of that name, in upper or lower case; ValueError for any other name."""
        try:
            return cls[label.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(repr(str(member)) for member in cls)
            raise ValueError(f"label: expected one of {names}, got {label!r}") from None


def scoring_func_of(scoring_func: ScoringFunc | str) -> ScoringFunc:
    """A ScoringFunc itself, or that of a name in upper or lower case; TypeError or ValueError for anything else."""
    if isinstance(scoring_func, str):
        check.one_of("scoring_func", scoring_func.lower(), [str(member) for member in ScoringFunc])
        return ScoringFunc.from_str(scoring_func)
    check.require_type(isinstance(scoring_func, ScoringFunc), "scoring_func", "a ScoringFunc or its name", scoring_func)
    return scoring_func


LEAST_SUM = 1e-20
"""Lower bound of the sum by which a token's scores are divided."""


def score(scoring_func: ScoringFunc, x: Any) -> Any:
    """Score of the float32 logit `x`, an expression; for softmax the logit itself, which gives the same ranking."""
    import tilelang.language as T

    if scoring_func is ScoringFunc.SIGMOID:
        return T.float32(1) / (T.float32(1) + scoring.exp(-x))
    if scoring_func is ScoringFunc.SQRTSOFTPLUS:
        return T.sqrt(T.if_then_else(x > T.float32(20), x, T.log1p(scoring.exp(x))))
    return x


def slope(scoring_func: ScoringFunc, x: Any, value: Any) -> Any:
    """Derivative of the score of the float32 logit `x`, whose score is `value`, an expression; not for softmax."""
    import tilelang.language as T

    if scoring_func is ScoringFunc.IDENTITY:
        return T.float32(1)
    if scoring_func is ScoringFunc.SIGMOID:
        return (T.float32(1) - value) * value
    # Where the score is 0 its slope is too: in the limit it is half the score.
    e = scoring.exp(x)
    of_softplus = T.if_then_else(x > T.float32(20), T.float32(1), e / (e + T.float32(1)))
    return T.if_then_else(value == T.float32(0), T.float32(0), of_softplus / (value + value))


def softmax_score(x: Any, sums: Any) -> Any:
    """Softmax score of the float32 logit `x`, an expression; `sums` comes from `softmax_sums_macro`."""
    return scoring.exp(x - sums[0]) / sums[1]


def clamped(total: Any) -> Any:
    """max(total, 1e-20), an expression; NaN stays NaN."""
    import tilelang.language as T

    return T.if_then_else(total < T.float32(LEAST_SUM), T.float32(LEAST_SUM), total)


@cache
def softmax_sums_macro(per_lane: int) -> Any:
    """Macro `softmax_sums(x, sums)`: sums = (max, Σ exp(x - max)) over the logits of a token, and x = exp(x - max).

    x float32 (per_lane,) in each lane of a warp, -∞ where the lane has no expert; sums float32 (2,), the same in every
    lane. Each lane adds its experts in order, then a butterfly reduction adds the lanes.
    """
    import tilelang.language as T

    @T.macro
    def softmax_sums(x: T.Buffer, sums: T.Buffer) -> None:
        key = T.alloc_var("int32")
        sums[0] = x[0]
        for j in T.unroll(1, per_lane):
            sums[0] = T.max(sums[0], x[j])
        # For integers one instruction finds the maximum of a warp, and sort keys are in the order of the floats.
        key = sort_key(sums[0])
        key = T.warp_reduce_max(key)
        sums[0] = rank_of(key)
        sums[1] = T.float32(0)
        for j in T.unroll(per_lane):
            x[j] = scoring.exp(x[j] - sums[0])
            sums[1] = sums[1] + x[j]
        sums[1] = T.warp_reduce_sum(sums[1])

    return softmax_sums


@cache
def load_logits_macro(num_experts: int, vector: int, run_length: int, dtype: torch.dtype) -> Any:
    """Macro `load_logits(logits, token, lane, x)`: a lane's logits of a token as float32, -∞ where there is no expert.

    x[j], float32, is the logit of expert_of(j, lane, run_length); its length and run_length are multiples of `vector`.
    """
    import tilelang.language as T

    @T.macro
    def load_logits(logits: T.Buffer, token: T.int32, lane: T.int32, x: T.Buffer) -> None:
        per_lane = x.shape[0]
        values = T.alloc_local((per_lane,), dtype)
        for c in T.unroll(per_lane // vector):
            if expert_of(c * vector, lane, run_length) < num_experts:
                for v in T.vectorized(vector):
                    values[c * vector + v] = logits[token, expert_of(c * vector, lane, run_length) + v]
        for j in T.unroll(per_lane):
            is_expert = expert_of(j, lane, run_length) < num_experts
            x[j] = T.if_then_else(is_expert, T.cast(values[j], "float32"), -T.infinity("float32"))

    return load_logits
