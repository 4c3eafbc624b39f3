"""Reference of grad_w_reduce."""

from torch import Tensor


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
