"""References of normalize_weight and its gradient."""

import torch


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of float32 (num_tokens, num_topk) divided by 1e-20 plus its sum, in order; returns (sum, quotients)."""
    denominator = topk_weights.new_full(topk_weights.shape[:1], 1e-20)
    for column in topk_weights.unbind(1):
        denominator = denominator + column
    return denominator, topk_weights / denominator.unsqueeze(1)


def normalize_weight_bwd(
    grad_normalized: torch.Tensor,
    grad_denominator: torch.Tensor | None,
    denominator: torch.Tensor,
    normalized: torch.Tensor,
) -> torch.Tensor:
    """(grad_normalized - Σ_k grad_normalized · normalized) / denominator + grad_denominator, the sum in order."""
    products = [grad * weight for grad, weight in zip(grad_normalized.unbind(1), normalized.unbind(1), strict=True)]
    dot = products[0]
    for product in products[1:]:
        dot = dot + product
    grad_w = (grad_normalized - dot.unsqueeze(1)) / denominator.unsqueeze(1)
    return grad_w if grad_denominator is None else grad_w + grad_denominator.unsqueeze(1)
