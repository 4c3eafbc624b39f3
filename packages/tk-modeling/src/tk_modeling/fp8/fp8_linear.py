"""Linear layers, FP8Linear alone and GroupedFP8Linear for each expert, of FP8 products forward and backward."""

import torch
from torch import Tensor, nn

from tk_core import check
from tk_modeling.fp8.functional import fp8_linear, grouped_fp8_linear
from tk_modeling.fp8.operands import BLOCK, check_features
from tk_modeling.options import check_placement


class FP8Linear(nn.Module):
    """`fp8_linear` with a weight of its own, bfloat16 or float32 (out_features, in_features), both multiples of 128.

    Shapes:
        x: (..., in_features) bfloat16, or float32 under autocast to bfloat16.
        returns: (..., out_features) bfloat16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_features(BLOCK, in_features=in_features, out_features=out_features)
        check_placement(device, dtype)
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return fp8_linear(x, self.weight)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}"


class GroupedFP8Linear(nn.Module):
    """`grouped_fp8_linear` with weights of its own, bfloat16 or float32 (num_experts, out_features, in_features).

    Both features are multiples of 128.

    Shapes:
        rows: (num_rows, in_features) bfloat16, or float32 under autocast to bfloat16; num_rows a multiple of 128.
        ends: int32 (num_experts,).
        returns: (num_rows, out_features) bfloat16.
    """

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
        check.in_range("num_experts", num_experts, 1, 2**31 - 1)
        check_features(BLOCK, in_features=in_features, out_features=out_features)
        check_placement(device, dtype)
        self.weight = nn.Parameter(torch.empty((num_experts, out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows · weight[i]ᵀ for the rows of each expert i."""
        return grouped_fp8_linear(rows, self.weight, ends)

    def extra_repr(self) -> str:
        num_experts, out_features, in_features = self.weight.shape
        return f"{num_experts}, {in_features}, {out_features}"
