"""Arguments that several SwiGLU ops have: checks, and what of them a kernel is compiled for."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_quant.cast.format import LEAST_NORMAL, OUT_DTYPES, PLAIN_DTYPES

ACTIVATIONS = ("silu", "swiglu_oai", "gelu_tanh", "relu2")
_ALPHA_OF_OAI = 1.702
_MAX_ALIGNMENT = 2**16
# Of a gate and its value beside each other.
_PAIR_DTYPES = {torch.bfloat16: torch.int32, torch.float32: torch.int64}


@dataclass(frozen=True)
class SwigluOptions:
    """Which optional arguments a call has, and which activation."""

    weights: bool
    experts: bool
    clamp: bool
    count: int = 0
    """Numbers that clamped_count has: 3 or 4, or 0 without it."""
    by_position: bool = False
    """Whether the weights are by position, not by pairs of a token and an expert."""
    scaled: bool = False
    """Whether weights are multiplied by routed_scaling_factor."""
    segments: tuple[int, int] | None = None
    """(experts, alignment) of psum_num_tokens_per_expert, if there is one."""
    activation: str = "silu"
    has_alpha: bool = False
    interleaved: bool = False
    gated: bool = True
    clamp_after: bool = False
    """Whether the clamp, which there is, cuts the gate after its activation."""

    @property
    def width(self) -> int:
        """Channels of x for each channel of the output."""
        return 2 if self.gated else 1

    @property
    def is_plain(self) -> bool:
        """Whether the activation is SiLU of the clamped gate."""
        return self.activation == "silu" and not self.has_alpha and not self.clamp_after

    @property
    def has_segments(self) -> bool:
        """Whether rows of padding are those between the experts' rows."""
        return self.segments is not None

    @property
    def pairs(self) -> bool:
        """Whether each row's weight is found by pos_to_token_topk."""
        return self.weights and not self.by_position


class Gating(NamedTuple):
    """The arguments that say what a gate and its value become, and where x has them; made by `check_gating`."""

    activation: str
    alpha: float | None
    interleaved: bool
    gated: bool
    clamp_after: bool

    @property
    def width(self) -> int:
        """Channels of x for each channel of the output."""
        return 2 if self.gated else 1

    @property
    def last_operands(self) -> list[float]:
        """What a kernel gets after all else: alpha, if there is one."""
        return [] if self.alpha is None else [self.alpha]

    def parts(self, x: Tensor) -> Tensor:
        """View x or its gradient as (rows, halves, channels): gates and values; or pairs of these, as integers."""
        if self.interleaved:
            return x.view(_PAIR_DTYPES[x.dtype]).unsqueeze(1)
        return x.view(x.shape[0], self.width, x.shape[1] // self.width)


class Rows(NamedTuple):
    """The arguments that give each row of x its weight, and tell which rows are padding."""

    pos_to_token_topk: Tensor | None
    topk_weights: Tensor | None
    pos_to_expert: Tensor | None
    psum_num_tokens_per_expert: Tensor | None
    token_alignment: int
    routed_scaling_factor: float | None

    @property
    def by_position(self) -> bool:
        """Whether topk_weights has a weight for each position."""
        return self.topk_weights is not None and self.topk_weights.ndim == 1

    @property
    def last_operands(self) -> list[Any]:
        """What a kernel gets after all else: psum_num_tokens_per_expert and routed_scaling_factor, if given."""
        psum, factor = self.psum_num_tokens_per_expert, self.routed_scaling_factor
        return [*([] if psum is None else [psum]), *([] if factor is None else [float(factor)])]

    def options(self, gating: Gating, clamp: float | None, clamped_count: Tensor | None = None) -> SwigluOptions:
        """What a kernel is compiled for."""
        psum = self.psum_num_tokens_per_expert
        return SwigluOptions(
            weights=self.topk_weights is not None,
            experts=self.pos_to_expert is not None,
            clamp=clamp is not None,
            count=0 if clamped_count is None else clamped_count.shape[0],
            by_position=self.by_position,
            scaled=self.routed_scaling_factor is not None,
            segments=None if psum is None else (psum.shape[0], self.token_alignment),
            activation=gating.activation,
            has_alpha=gating.alpha is not None,
            interleaved=gating.interleaved,
            gated=gating.gated,
            clamp_after=gating.clamp_after and clamp is not None,
        )


def either(names: tuple[str, str], first: Any, second: Any) -> Any:
    """The one of two arguments for the same thing that is not None; ValueError if neither is."""
    if first is not None and second is not None:
        check.require(False, names[1], f"None beside {names[0]}, which is the same", second)
    return second if first is None else first


def check_clamp_value(value: Any, other: Any = None) -> float | None:
    """The clamp of swiglu_clamp_value or clamp_value: None, a positive normal float32, or infinity (no clamp)."""
    name = "swiglu_clamp_value" if other is None else "clamp_value"
    value = either(("swiglu_clamp_value", "clamp_value"), value, other)
    if value is not None and not (isinstance(value, float) and value == math.inf):
        check.number(name, value, at_least=LEAST_NORMAL)
    return value


def check_gating(activation: Any, alpha: Any, interleaved: Any, gated: Any, clamp_after: Any) -> Gating:
    """The arguments, checked, with the alpha that swiglu_oai has where none is given."""
    check.one_of("activation", activation, ACTIVATIONS)
    for name, flag in (("interleaved", interleaved), ("gated", gated), ("clamp_after", clamp_after)):
        check.flag(name, flag)
    if alpha is not None:
        check.number("alpha", alpha, at_least=LEAST_NORMAL)
        has_alpha = activation in ("silu", "swiglu_oai")
        check.require(has_alpha, "alpha", "None beside activation {!r}", alpha, activation)
    check.require(gated or activation != "swiglu_oai", "gated", "True beside activation 'swiglu_oai'", gated)
    check.require(gated or not interleaved, "interleaved", "False without gated", interleaved)
    is_after_silu = activation == "silu" or not clamp_after
    check.require(is_after_silu, "clamp_after", "False beside activation {!r}", clamp_after, activation)
    if activation == "swiglu_oai" and alpha is None:
        alpha = _ALPHA_OF_OAI
    return Gating(activation, None if alpha is None else float(alpha), interleaved, gated, clamp_after)


def check_rows(x: Tensor, rows: Rows) -> None:
    """Check the arguments that give each row of x its weight and its expert. TK_DEBUG: an index past the end raises."""
    num_positions, device = x.shape[0], x.device
    pos_to_token_topk, topk_weights, pos_to_expert, psum, alignment, factor = rows
    if pos_to_token_topk is not None:
        check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), (num_positions,), device=device)
        check.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", "num_topk"), device=device)
        expected = "indices into topk_weights, below {}"
        check.below("pos_to_token_topk", pos_to_token_topk, topk_weights.numel(), expected)
    elif isinstance(topk_weights, Tensor) and topk_weights.ndim == 2:
        check.require(False, "pos_to_token_topk", "a tensor beside topk_weights of two dimensions", None)
    elif topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (num_positions,), device=device)
    if pos_to_expert is not None:
        check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), (num_positions,), device=device)
    check.in_range("token_alignment", alignment, 1, _MAX_ALIGNMENT)
    if psum is not None:
        name = "psum_num_tokens_per_expert"
        check.tensor(name, psum, (torch.int32,), ("num_experts",), device=device)
        check.require(psum.shape[0] > 0, name, "at least one expert", psum.shape[0])
        check.ends(name, psum, alignment)
    if factor is not None:
        check.number("routed_scaling_factor", factor)
        check.require(topk_weights is not None, "topk_weights", "a tensor beside routed_scaling_factor", None)


def check_swiglu_arguments(x: Tensor, fmt: Any, rows: Rows, gating: Gating) -> torch.dtype:
    """Check the arguments that the forward and the backward share; return the output's dtype."""
    _, width = check.tensor("x", x, PLAIN_DTYPES, ("num_positions", "2 * hidden" if gating.gated else "hidden"))
    multiple = 64 * gating.width
    check.require(width > 0 and width % multiple == 0, "x", "a positive multiple of {} columns", width, multiple)
    check.one_of("fmt", fmt, OUT_DTYPES)
    check_rows(x, rows)
    return OUT_DTYPES[fmt]


def check_clamped_count(x: Tensor, clamped_count: Tensor | None, clamp: float | None) -> None:
    """Raise unless clamped_count is None, or int64 (3,) or (4,) beside a clamp value."""
    if clamped_count is not None:
        check.require(clamp is not None, "swiglu_clamp_value", "a number beside clamped_count", None)
        check.tensor("clamped_count", clamped_count, (torch.int64,), ("3 or 4",), device=x.device)
        check.require(clamped_count.shape[0] in (3, 4), "clamped_count", "3 or 4 numbers", clamped_count.shape[0])


def check_maps_agree(pos_to_token_topk: Tensor, token_topk_to_pos: Tensor) -> None:
    """Raise ValueError unless pos_to_token_topk names each pair at the pair's position; waits for the device."""
    pairs, positions = token_topk_to_pos.flatten().long(), pos_to_token_topk.flatten()
    placed = ((pairs >= 0) & (pairs < positions.numel())).nonzero().flatten()
    strays = placed[positions[pairs[placed]] != placed]
    if strays.numel():
        pair = int(strays[0])
        pos = int(pairs[pair])
        check.require(False, "pos_to_token_topk", f"{pair} at position {pos}", int(positions[pos]))
