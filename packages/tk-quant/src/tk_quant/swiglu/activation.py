"""Shared by the SwiGLU kernels: the index of a row's weight, the clamp, and SiLU without a branch.

With the divisions of cast/scales.py, x / (1 + exp(-x)) is the IEEE result for x within ±87. For a bfloat16 x, s = r is
accurate enough there, except if d = 2 - 2**-23: then r has to be the float32 nearest to 1 / d, which nvcc's own
division needs as well. Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_quant.cast.scales import quotient, reciprocal
from tk_quant.swiglu.arguments import SwigluOptions

NEAR_SF = 0.194
"""Up to this sf every e4m3 code times sf is within ±87, or NaN."""
NEAR_LIMIT = 0x42AE
"""The bits of 87 as bfloat16."""


def pair_of_row(
    position: Any,
    num_positions: Any,
    pos_to_token_topk: Any,
    pos_to_expert: Any,
    num_pairs: Any,
    options: SwigluOptions,
) -> Any:
    """Expression: index of a row's weight in topk_weights, 0 without weights; -1 for padding and rows past the last."""
    pair, is_real = T.int32(0), position < num_positions
    if options.weights:
        pair = T.if_then_else(position < num_positions, pos_to_token_topk[position], -1)
        is_real = T.And(pair >= 0, pair < num_pairs)
    if options.experts:
        is_real = T.And(is_real, T.if_then_else(position < num_positions, pos_to_expert[position], -1) >= 0)
    return T.if_then_else(is_real, pair, -1)


def clamp_gate(x: Any, limit: Any, options: SwigluOptions) -> Any:
    """float32 expression of the gate x, clamped to at most `limit` if the call has a clamp; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, x) if options.clamp else x


def clamp_value(x: Any, limit: Any, options: SwigluOptions) -> Any:
    """float32 expression of the value x, clamped to [-limit, limit] if the call has a clamp; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, T.if_then_else(x < -limit, -limit, x)) if options.clamp else x


@T.macro
def near_sigmoid(x: T.float32) -> tuple[T.float32, T.float32]:
    """Sigmoid and SiLU, 1 / (1 + exp(-x)) and x / (1 + exp(-x)), for x within ±87 or NaN."""
    d = T.float32(1) + T.exp(-x)
    s = reciprocal(d)
    return s, quotient(x, d, s)


@T.macro
def near_silu(x: T.float32) -> T.float32:
    """SiLU, x / (1 + exp(-x)), for a bfloat16 x within ±87 or NaN."""
    d = T.float32(1) + T.exp(-x)
    return quotient(x, d, T.fast_rcp(d))
