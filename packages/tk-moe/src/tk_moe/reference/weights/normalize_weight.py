"""Reference of normalize_weight."""

import torch


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of float32 (num_tokens, num_topk) divided by 1e-20 plus its sum, in order; returns (sum, quotients)."""
    denominator = topk_weights.new_full(topk_weights.shape[:1], 1e-20)
    for column in topk_weights.unbind(1):
        denominator = denominator + column
    return denominator, topk_weights / denominator.unsqueeze(1)
