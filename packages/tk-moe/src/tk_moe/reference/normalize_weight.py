"""Reference of normalize_weight."""

import torch


def normalize_weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of w float32 (num_tokens, num_topk) over 1e-20 plus its sum in order; returns (sum, quotients)."""
    denominator = w.new_full(w.shape[:1], 1e-20)
    for column in w.unbind(1):
        denominator = denominator + column
    return denominator, w / denominator.unsqueeze(1)
