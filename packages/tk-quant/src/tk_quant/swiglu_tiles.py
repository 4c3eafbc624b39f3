"""What the tile-level SwiGLU kernels have in common: which rows are real, and the clamp."""

from typing import Any

import tilelang.language as T


def is_real_row(
    position: Any, pos_to_token_topk: Any, pos_to_expert: Any, num_pairs: Any, has_weights: bool, has_experts: bool
) -> Any:
    """Whether the row is no padding, an expression: it has an expert, and its weight is there."""
    is_real = T.bool(True)
    if has_experts:
        is_real = pos_to_expert[position] >= 0
    if has_weights:
        pair = pos_to_token_topk[position]
        is_real = T.And(is_real, T.And(pair >= 0, pair < num_pairs))
    return is_real


def clamp_gate(x: Any, limit: Any) -> Any:
    """float32 x, at most `limit`, an expression; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, x)


def clamp_value(x: Any, limit: Any) -> Any:
    """float32 x in [-limit, limit], an expression; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, T.if_then_else(x < -limit, -limit, x))
