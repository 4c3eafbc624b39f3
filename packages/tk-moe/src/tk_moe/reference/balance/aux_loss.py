"""Reference of aux_loss and aux_loss_bwd, in float64."""

import torch


def aux_loss(scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """alpha · Σ_e fi[e] · P[e], P the mean over tokens of scores (num_tokens, num_experts) / (their sum + 1e-20)."""
    shares = scores.double() / (scores.double().sum(1, keepdim=True) + 1e-20)
    mean = shares.sum(0) / max(scores.shape[0], 1)
    return (alpha * (fi.double() * mean).sum()).to(scores.dtype)


def aux_loss_bwd(grad_loss: torch.Tensor, scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Gradient of `aux_loss` by scores."""
    row_sum = scores.double().sum(1, keepdim=True) + 1e-20
    part = (fi.double() * scores.double()).sum(1, keepdim=True) / row_sum
    scale = grad_loss.double() * alpha / max(scores.shape[0], 1)
    return (scale * (fi.double() - part) / row_sum).to(scores.dtype)
