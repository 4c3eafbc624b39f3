"""Reference of topk_gate."""

import torch


def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """First `num_topk` columns of a stable descending argsort of each row of scores (num_tokens, num_experts)."""
    # Radix sorts distinguish NaNs by their bits, and -0 from +0; so make them equal first.
    scores = torch.where(scores.isnan(), torch.full_like(scores, torch.nan), scores)
    scores = torch.where(scores == 0, torch.zeros_like(scores), scores)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :num_topk].clone(memory_format=torch.contiguous_format)
