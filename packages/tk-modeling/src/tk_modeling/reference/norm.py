"""RMSNorm in plain PyTorch."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The same as tk_modeling.RMSNorm, of any floating-point dtype."""

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        self.weight = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        norm_input = x if residual is None else x + residual
        wide = torch.promote_types(x.dtype, torch.float32)
        values, weight = norm_input.to(wide), self.weight.to(wide) + self.weight_offset
        out = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.round_before_weight:
            out = out.to(x.dtype)
        out = (out * weight).to(x.dtype)
        return out if residual is None else (out, norm_input)
