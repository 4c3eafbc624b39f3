"""Reference of normalize_weight_bwd."""

import torch


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
