"""Checks of the maps between (token, slot) pairs and their positions, which are rows of the experts' segments."""

import torch
from torch import Tensor

from tk_core import check


def check_positions(
    token_topk_to_pos: Tensor, num_tokens: int | str, num_expanded_tokens: int, device: torch.device
) -> torch.Size:
    """Check int32 (num_tokens, num_topk) positions and return their shape; TK_DEBUG=1 rejects any past the last row."""
    expected = num_tokens, "num_topk"
    shape = check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), expected, device=device)
    check.require(shape[1] >= 1, "token_topk_to_pos", "at least one slot a token", shape[1])
    check.below("token_topk_to_pos", token_topk_to_pos, num_expanded_tokens, "positions below {}")
    return shape


def check_experts(pos_to_expert: Tensor, device: torch.device) -> int:
    """Check pos_to_expert, int32 (num_expanded_tokens,), and return num_expanded_tokens."""
    return check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), ("num_expanded_tokens",), device=device)[0]


def check_each_once(token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> None:
    """With TK_DEBUG=1: raise unless each row with an expert is the position of one pair, and other rows of none."""
    if not check.reads_data(pos_to_expert):
        return
    num_expanded_tokens = pos_to_expert.shape[0]
    positions = token_topk_to_pos[token_topk_to_pos >= 0].long()
    check.below("token_topk_to_pos", positions, num_expanded_tokens, "positions below {}")
    wrong = torch.bincount(positions, minlength=num_expanded_tokens) != (pos_to_expert >= 0)
    where = wrong.nonzero().flatten()[:4].tolist()
    expected = "every row with pos_to_expert >= 0 once and no other row"
    check.require(not where, "token_topk_to_pos", expected, f"another count for rows {where}")
