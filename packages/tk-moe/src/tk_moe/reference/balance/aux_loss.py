"""Reference of aux_loss and aux_loss_bwd, in float64."""

import torch


def aux_loss(scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """alpha · Σ_e fi[e] · P[e], P the mean over tokens of scores (num_tokens, num_experts) / (their sum + 1e-20)."""
    row_sum = scores.double().sum(1, keepdim=True)
    # A token whose scores are all 0 adds nothing, and gets gradient 0 by autograd, where the division would give 1e20.
    shares = torch.where(row_sum == 0, 0, scores.double() / (row_sum + 1e-20))
    mean = shares.sum(0) / max(scores.shape[0], 1)
    return (alpha * (fi.double() * mean).sum()).to(scores.dtype)


def aux_loss_bwd(grad_loss: torch.Tensor, scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Gradient of `aux_loss` with respect to scores; 0 for a token whose scores sum to 0."""
    row_sum = scores.double().sum(1, keepdim=True)
    divisor = row_sum + 1e-20
    part = (fi.double() * scores.double()).sum(1, keepdim=True) / divisor
    scale = grad_loss.double() * alpha / max(scores.shape[0], 1)
    return torch.where(row_sum == 0, 0, scale * (fi.double() - part) / divisor).to(scores.dtype)
