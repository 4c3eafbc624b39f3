"""Arguments that several SwiGLU ops have: checks, and which of them a kernel is compiled for."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_quant.cast.format import LEAST_NORMAL, OUT_DTYPES, PLAIN_DTYPES


@dataclass(frozen=True)
class SwigluOptions:
    """Which optional arguments a call has."""

    weights: bool
    experts: bool
    clamp: bool
    count: bool = False


def check_clamp_value(value: Any) -> None:
    """Raise unless `value` is None, a positive normal float32, or infinity, which clamps nothing."""
    if value is not None and not (isinstance(value, float) and value == math.inf):
        check.number("swiglu_clamp_value", value, at_least=LEAST_NORMAL)


def check_row_maps(
    x: Tensor, pos_to_token_topk: Tensor | None, topk_weights: Tensor | None, pos_to_expert: Tensor | None
) -> None:
    """Check the maps that give each row of x its weight and its expert. With TK_DEBUG, an index past the end raises."""
    num_positions, device = x.shape[0], x.device
    if pos_to_token_topk is not None:
        check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), (num_positions,), device=device)
        check.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", "num_topk"), device=device)
        expected = "indices into topk_weights, below {}"
        check.below("pos_to_token_topk", pos_to_token_topk, topk_weights.numel(), expected)
    elif topk_weights is not None:
        check.require(False, "pos_to_token_topk", "a tensor beside topk_weights", None)
    if pos_to_expert is not None:
        check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), (num_positions,), device=device)


def check_swiglu_arguments(
    x: Tensor,
    swiglu_clamp_value: Any,
    fmt: Any,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
) -> torch.dtype:
    """Check the arguments that the forward and the backward share; return the output's dtype."""
    _, width = check.tensor("x", x, PLAIN_DTYPES, ("num_positions", "2 * hidden"))
    check.require(width > 0 and width % 128 == 0, "x", "a positive multiple of 128 columns", width)
    check.one_of("fmt", fmt, OUT_DTYPES)
    check_row_maps(x, pos_to_token_topk, topk_weights, pos_to_expert)
    check_clamp_value(swiglu_clamp_value)
    return OUT_DTYPES[fmt]


def check_clamped_count(x: Tensor, clamped_count: Tensor | None, swiglu_clamp_value: float | None) -> None:
    """Raise unless clamped_count is None, or int64 (3,) beside a clamp value."""
    if clamped_count is not None:
        check.require(swiglu_clamp_value is not None, "swiglu_clamp_value", "a number beside clamped_count", None)
        check.tensor("clamped_count", clamped_count, (torch.int64,), (3,), device=x.device)


def check_maps_agree(pos_to_token_topk: Tensor, token_topk_to_pos: Tensor) -> None:
    """Raise ValueError unless pos_to_token_topk names each pair at the pair's position; waits for the device."""
    pairs, positions = token_topk_to_pos.flatten().long(), pos_to_token_topk.flatten()
    placed = ((pairs >= 0) & (pairs < positions.numel())).nonzero().flatten()
    strays = placed[positions[pairs[placed]] != placed]
    if strays.numel():
        pair = int(strays[0])
        pos = int(pairs[pair])
        check.require(False, "pos_to_token_topk", f"{pair} at position {pos}", int(positions[pos]))
