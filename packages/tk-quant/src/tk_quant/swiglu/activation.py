"""Shared by the SwiGLU kernels: the index of a row's weight, the clamp, the activations, and SiLU without a branch.

With the divisions of cast/scales.py, x / (1 + exp(-x)) is the IEEE result for x within ±87. For a bfloat16 x, s = r is
accurate enough there, except if d = 2 - 2**-23: then r has to be the float32 nearest to 1 / d, which nvcc's own
division needs as well. x / (1 + exp(-z)) for another z takes one correction more. Kernels import this module in their
builder, as it imports TileLang.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch

from tk_quant.cast.scales import quotient, reciprocal, refined_quotient
from tk_quant.swiglu.arguments import SwigluOptions

NEAR_SF = 0.194
"""Up to this sf every e4m3 code times sf is within ±87, or NaN."""
NEAR_LIMIT = 0x42AE
"""The bits of 87 as bfloat16."""
NEAR_SF_OF_GELU = 0.0221
"""The same as NEAR_SF for gelu_tanh, whose exponent is within ±87 for a gate within ±9.9375."""
NEAR_LIMIT_OF_GELU = 0x411F
"""The bits of 9.9375 as bfloat16."""
NEAR_ALPHA = 64.0
"""Up to this alpha no quotient of a gate whose exponent is within ±87 loses bits by being subnormal."""
_GELU = float.fromhex("0x1.988454p0"), float.fromhex("0x1.2444F2p-4")
"""2 * sqrt(2 / pi), and 0.044715 times it: tanh's form of GELU is the gate times a logistic function."""
_GELU_SLOPE = float.fromhex("0x1.B6676Cp-3")
"""Three times the second, rounded."""
_GELU_CUT = 16.0


class Scalars(NamedTuple):
    """Numbers of a call; what it lacks is any number."""

    clamp: T.float32
    alpha: T.float32


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


def element_type(dtype: torch.dtype, options: SwigluOptions) -> Any:
    """TileLang type of an element of x or its gradient as a tile-level kernel sees it, which `Gating.parts` makes."""
    if not options.interleaved:
        return T.dtype(dtype)
    return T.dtype("int32" if dtype is torch.bfloat16 else "int64")


def gate_of(x: Any, options: SwigluOptions) -> Any:
    """float32 expression of the gate in an element of x, or in a pair of a gate and its value as an integer."""
    if not options.interleaved:
        return T.cast(x, "float32")
    return T.reinterpret(x << 16 if x.dtype == "int32" else T.cast(x, "uint32"), "float32")


def value_of(x: Any, options: SwigluOptions) -> Any:
    """float32 expression of the value in an element of x, or in a pair of a gate and its value as an integer."""
    if not options.interleaved:
        return T.cast(x, "float32")
    bits = x & T.int32(-0x10000) if x.dtype == "int32" else T.cast(x >> T.int64(32), "uint32")
    return T.reinterpret(bits, "float32")


def pair_of(gate: Any, value: Any, pair_dtype: str) -> Any:
    """Expression of a pair of float32, rounded to bfloat16 for a pair of 32 bits."""
    if pair_dtype == "int64":
        bits = [T.cast(T.reinterpret(each, "uint32"), "uint64") for each in (gate, value)]
        return T.reinterpret(bits[0] | bits[1] << T.uint64(32), "int64")
    bits = [T.cast(T.reinterpret(T.cast(each, "bfloat16"), "uint16"), "uint32") for each in (gate, value)]
    return T.reinterpret(bits[0] | bits[1] << T.uint32(16), "int32")


def _at_most(x: Any, limit: Any) -> Any:
    """float32 expression of x, or the limit where x is more; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, x)


def _between(x: Any, limit: Any) -> Any:
    """float32 expression of x cut to [-limit, limit]; NaN stays NaN."""
    return T.if_then_else(x > limit, limit, T.if_then_else(x < -limit, -limit, x))


def clamp_gate(x: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """float32 expression of the gate x, clamped if the call has a clamp that comes before the activation."""
    return _at_most(x, scalars.clamp) if options.clamp and not options.clamp_after else x


def value_factor(x: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """float32 expression of what the value x multiplies the activation by: it, clamped, for swiglu_oai plus 1."""
    factor = _between(x, scalars.clamp) if options.clamp else x
    return factor + T.float32(1) if options.activation == "swiglu_oai" else factor


def times_value(x: Any, factor: Any, options: SwigluOptions) -> Any:
    """float32 expression of x times a value's factor, or of x where gates have no values."""
    return x * factor if options.gated else x


def _silu(gate: Any, scalars: Scalars, options: SwigluOptions) -> tuple[Any, Any]:
    z = scalars.alpha * gate if options.has_alpha else gate
    return z, z


def _gelu_tanh(gate: Any) -> tuple[Any, Any]:
    cut = _between(gate, T.float32(_GELU_CUT))
    linear, cubic = map(T.float32, _GELU)
    return cut * (linear + cubic * (cut * cut)), cut * (linear + T.float32(_GELU_SLOPE) * (cut * cut))


def _relu2(gate: Any) -> tuple[Any, Any]:
    positive = T.if_then_else(gate <= T.float32(0), T.float32(0), gate)
    return positive * positive, T.float32(2) * positive


def exponents(gate: Any, scalars: Scalars, options: SwigluOptions) -> tuple[Any, Any]:
    """float32 expressions of z in the activation gate / (1 + exp(-z)), and of z's slope times the gate."""
    return _gelu_tanh(gate) if options.activation == "gelu_tanh" else _silu(gate, scalars, options)


def divisor_of(gate: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """float32 expression of 1 + exp(-z); relu2 divides by nothing."""
    if options.activation == "relu2":
        return T.float32(1)
    return T.float32(1) + T.exp(-exponents(gate, scalars, options)[0])


def activation_of(gate: Any, divisor: Any, options: SwigluOptions) -> Any:
    """float32 expression of a gate's activation, before a clamp that comes after it; `divisor` is the gate's."""
    return _relu2(gate)[0] if options.activation == "relu2" else gate / divisor


def clamp_activation(x: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """float32 expression of an activation, clamped if the call has a clamp that comes after it."""
    return _at_most(x, scalars.clamp) if options.clamp_after else x


def activated(gate: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """float32 expression of the activation of a gate that `clamp_gate` returned, and its clamp."""
    divisor = divisor_of(gate, scalars, options)
    return clamp_activation(activation_of(gate, divisor, options), scalars, options)


def slope_factor(gate: Any, divisor: Any, options: SwigluOptions) -> Any:
    """float32 expression of what gradients are multiplied by first: 1 / divisor, for relu2 the slope."""
    return _relu2(gate)[1] if options.activation == "relu2" else T.float32(1) / divisor


def gate_gradient(
    scaled: Any, gate: Any, factor: Any, scalars: Scalars, options: SwigluOptions, fma: Any = T.fma
) -> Any:
    """float32 expression of a gate's gradient: `scaled`, multiplied by its slope_factor already, times what is left."""
    if options.activation == "relu2":
        return scaled
    product = exponents(gate, scalars, options)[1]
    return scaled * fma(product, T.float32(1) - factor, T.float32(1))


def value_gradient(
    scaled: Any, grad: Any, weight: Any, gate: Any, activation: Any, scalars: Scalars, options: SwigluOptions
) -> Any:
    """float32 expression of a value's gradient: `scaled`, grad times weight times slope_factor, times the gate; or grad
    times weight times the activation, where this is clamped or no quotient. `activation` is that before a clamp.
    """
    weighted = grad * weight if options.weights else grad
    if options.activation == "relu2":
        return weighted * activation
    if options.clamp_after:
        return T.if_then_else(activation > scalars.clamp, weighted * scalars.clamp, scaled * gate)
    return scaled * gate


def is_gate_clamped(gate: Any, scalars: Scalars, options: SwigluOptions) -> Any:
    """Expression: whether the clamp of a call cuts a gate, or with clamp_after its activation."""
    if options.clamp_after:
        gate = activation_of(gate, divisor_of(gate, scalars, options), options)
    return gate > scalars.clamp


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


@T.macro
def near_logistic(x: T.float32, z: T.float32) -> tuple[T.float32, T.float32]:
    """1 / (1 + exp(-z)) and x / (1 + exp(-z)), for z within ±87, and x that is not subnormal beside it (NEAR_ALPHA)."""
    d = T.float32(1) + T.exp(-z)
    s = reciprocal(d)
    return s, refined_quotient(x, d, s)
