"""What the tile-level SwiGLU kernels have in common: which rows are real, and the clamp."""

from typing import Any

import tilelang.language as T

from tk_quant.swiglu.swiglu_forward import Given


def pair_of_row(
    position: Any, num_positions: Any, pos_to_token_topk: Any, pos_to_expert: Any, num_pairs: Any, given: Given
) -> Any:
    """Index of the row's weight, an expression; any without weights. -1 for padding and past the last row."""
    pair, is_real = T.int32(0), position < num_positions
    if given.weights:
        pair = T.if_then_else(position < num_positions, pos_to_token_topk[position], -1)
        is_real = T.And(pair >= 0, pair < num_pairs)
    if given.experts:
        is_real = T.And(is_real, T.if_then_else(position < num_positions, pos_to_expert[position], -1) >= 0)
    return T.if_then_else(is_real, pair, -1)


def clamp_gate(x: Any, limit: Any, given: Given) -> Any:
    """float32 x, at most `limit` if there is one, an expression; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, x) if given.clamp else x


def clamp_value(x: Any, limit: Any, given: Given) -> Any:
    """float32 x in [-limit, limit] if there is one, an expression; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, T.if_then_else(x < -limit, -limit, x)) if given.clamp else x
