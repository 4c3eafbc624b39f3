"""FP8Linear and GroupedFP8Linear in plain PyTorch: linear layers in the dtype of their weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional

_ALIGNMENT = 128


class FP8Linear(nn.Module):
    """The same as tk_modeling.FP8Linear, of any floating-point dtype and not rounded to e4m3."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class GroupedFP8Linear(nn.Module):
    """The same as tk_modeling.GroupedFP8Linear, of any floating-point dtype and not rounded to e4m3."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((num_experts, out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows · weight[i]ᵀ for the rows of each expert i, zeros for all other rows."""
        out, start = [], 0
        for weight, end in zip(self.weight, ends.tolist(), strict=True):
            next_start = -(-end // _ALIGNMENT) * _ALIGNMENT
            out.append(rows[start:end] @ weight.t())
            out.append(rows.new_zeros((next_start - end, weight.shape[0])))
            start = next_start
        out.append(rows.new_zeros((len(rows) - start, self.weight.shape[1])))
        return torch.cat(out)
