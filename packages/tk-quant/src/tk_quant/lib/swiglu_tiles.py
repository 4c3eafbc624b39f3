"""Shared by the SwiGLU kernels: the index of a row's weight, at the tile level, and the clamp, at both levels."""

from typing import Any

import tilelang.language as T

from tk_quant.swiglu.swiglu_forward import Given


def pair_of_row(
    position: Any, num_positions: Any, pos_to_token_topk: Any, pos_to_expert: Any, num_pairs: Any, given: Given
) -> Any:
    """Expression: index of a row's weight in topk_weights, 0 without weights; -1 for padding and rows past the last."""
    pair, is_real = T.int32(0), position < num_positions
    if given.weights:
        pair = T.if_then_else(position < num_positions, pos_to_token_topk[position], -1)
        is_real = T.And(pair >= 0, pair < num_pairs)
    if given.experts:
        is_real = T.And(is_real, T.if_then_else(position < num_positions, pos_to_expert[position], -1) >= 0)
    return T.if_then_else(is_real, pair, -1)


def clamp_gate(x: Any, limit: Any, given: Given) -> Any:
    """float32 expression of the gate x, clamped to at most `limit` if the call has a clamp; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, x) if given.clamp else x


def clamp_value(x: Any, limit: Any, given: Given) -> Any:
    """float32 expression of the value x, clamped to [-limit, limit] if the call has a clamp; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, T.if_then_else(x < -limit, -limit, x)) if given.clamp else x
