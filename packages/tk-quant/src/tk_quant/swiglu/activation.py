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
    segment: tuple[Any, Any] | None = None,
) -> Any:
    """Expression: index of a row's weight in topk_weights, 0 without weights; -1 for padding and rows past the last.

    `segment`: (number of experts whose rows end before or at this row, where the last of these ends).
    """
    pair, is_real = T.int32(0), position < num_positions
    if options.pairs:
        pair = T.if_then_else(position < num_positions, pos_to_token_topk[position], -1)
        is_real = T.And(pair >= 0, pair < num_pairs)
    if options.by_position:
        pair = position
    if options.experts:
        is_real = T.And(is_real, T.if_then_else(position < num_positions, pos_to_expert[position], -1) >= 0)
    if segment is not None:
        is_real = T.And(is_real, is_in_segment(position, *segment, options))
    return T.if_then_else(is_real, pair, -1)


def is_in_segment(position: Any, num_ended: Any, end: Any, options: SwigluOptions) -> Any:
    """Expression: whether a row is an expert's, given how many experts' rows end before it, the last of them at `end`.

    The next expert's rows begin where `end` is rounded up to a multiple of the alignment.
    """
    num_experts, alignment = options.segments
    first = T.cast(T.cast(end + (alignment - 1), "uint32") // T.uint32(alignment) * T.uint32(alignment), "int32")
    return T.And(num_ended < num_experts, position >= first)


def _half(num_experts: int, step: Any) -> Any:
    """Experts by which a binary search advances in a step: the powers of two up to `num_experts`, the largest first."""
    return (1 << (num_experts.bit_length() - 1)) >> step


@T.macro
def find_segment(expert_ends: T.Buffer, row: T.int32) -> tuple[T.int32, T.int32]:
    """`num_ended` and `end` of `is_in_segment` for a row."""
    num_experts = int(expert_ends.shape[0])
    num_ended, end, probe = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0), T.alloc_var("int32")
    for step in T.unroll(num_experts.bit_length()):
        half = _half(num_experts, step)
        probe = T.reinterpret(T.ldg32(expert_ends[T.min(num_ended + half, num_experts) - 1]), "int32")
        if num_ended + half <= num_experts and probe <= row:
            num_ended, end = num_ended + half, probe
    return num_ended, end


@T.macro
def find_segments(expert_ends: T.Buffer, first: T.int32, num_ended: T.Buffer, ends: T.Buffer) -> None:
    """Fill fragments with `num_ended` and `end` of `is_in_segment` for the rows from `first` on."""
    num_experts, num_rows = int(expert_ends.shape[0]), num_ended.shape[0]
    for r in T.Parallel(num_rows):
        num_ended[r] = 0
        ends[r] = 0
    for step in T.unroll(num_experts.bit_length()):
        half = _half(num_experts, step)
        for r in T.Parallel(num_rows):
            probe = expert_ends[T.min(num_ended[r] + half, num_experts) - 1]
            if num_ended[r] + half <= num_experts and probe <= first + r:
                num_ended[r] = num_ended[r] + half
                ends[r] = probe


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
