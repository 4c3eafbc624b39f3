"""RMSNorm: a row divided by the root of its mean square, times a learned weight."""

import torch
from torch import Tensor, nn

from tk_core import check
from tk_modeling.norm.functional import rms_norm
from tk_modeling.options import check_flags, check_numbers, check_placement


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · (weight + weight_offset), of x or of x + residual. See `tk_modeling.rms_norm`.

    Source: Zhang and Sennrich, arXiv 1910.07467. Names of parameters and buffers are those of Hugging Face's classes.

    Args:
        hidden: H, a multiple of 8, up to 16384.
        eps: added to the mean square; attribute `variance_epsilon`.
        weight_offset: added to the weight; 1 in Gemma's norms.
        round_before_weight: round to the input's dtype before the product with the weight, as most of Hugging Face's
            classes do.
        device: of the weight.
        dtype: of the weight, float32 or bfloat16; None for torch's default.

    Parameter `weight` (H) is 1 - weight_offset at first.
    """

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
        check.in_range("hidden", hidden, 8, 16384)
        check.multiple_of("hidden", hidden, 8)
        check_numbers(eps=eps)
        check.number("weight_offset", weight_offset)
        check_flags(round_before_weight=round_before_weight)
        check_placement(device, dtype)
        self.variance_epsilon = eps
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        self.weight = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that with its offset it is 1."""
        nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., T, H) → out (..., T, H); with a residual (..., T, H) → (out, x + residual)."""
        options = {"weight_offset": self.weight_offset, "round_before_weight": self.round_before_weight}
        return rms_norm(x, self.weight, self.variance_epsilon, residual, **options)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        options = f"weight_offset={self.weight_offset}, round_before_weight={self.round_before_weight}"
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}, {options}"
