"""Checks of arguments that several SwiGLU ops have."""

import math
from typing import Any

import torch
from torch import Tensor

from tk_core import check

_LEAST_NORMAL = 2.0**-126


def check_clamp_value(value: Any) -> None:
    """Raise unless `value` is None, a positive normal float32, or infinity, which clamps nothing."""
    if value is not None and not (isinstance(value, float) and value == math.inf):
        check.number("swiglu_clamp_value", value, at_least=_LEAST_NORMAL)


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


def check_maps_agree(pos_to_token_topk: Tensor, token_topk_to_pos: Tensor) -> None:
    """Raise ValueError unless pos_to_token_topk names each pair at the pair's position; waits for the device."""
    pairs, positions = token_topk_to_pos.flatten().long(), pos_to_token_topk.flatten()
    placed = ((pairs >= 0) & (pairs < positions.numel())).nonzero().flatten()
    strays = placed[positions[pairs[placed]] != placed]
    if strays.numel():
        pair = int(strays[0])
        pos = int(pairs[pair])
        check.require(False, "pos_to_token_topk", f"{pair} at position {pos}", int(positions[pos]))
