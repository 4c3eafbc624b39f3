"""References of fused_weight and grad_w_reduce."""

import torch
from torch import Tensor


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """weight_hidden · weight_embed, (m, H), in float32, or float64 if the weights are float64."""
    dtype = torch.promote_types(weight_hidden.dtype, torch.float32)
    return weight_hidden.to(dtype) * weight_embed.to(dtype)


def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """grad_weight_hidden += Σ_b grad_w_partial[b] · weight_embed; grad_weight_embed with weight_hidden."""
    grad_w = grad_w_partial.sum(0)
    grad_weight_hidden += grad_w * weight_embed.to(grad_w.dtype)
    grad_weight_embed += grad_w * weight_hidden.to(grad_w.dtype)
