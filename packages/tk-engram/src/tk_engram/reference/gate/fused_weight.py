"""Reference of fused_weight."""

import torch
from torch import Tensor


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """weight_hidden · weight_embed, (m, H), in float32, or float64 if the weights are float64."""
    dtype = torch.promote_types(weight_hidden.dtype, torch.float32)
    return weight_hidden.to(dtype) * weight_embed.to(dtype)
