"""EngramGate: adds the value that was looked up for a token to each of its streams, times a learned gate."""

import torch
from torch import Tensor, nn

from tk_core import check
from tk_modeling.engram.functional import engram_gate
from tk_modeling.options import check_numbers, check_placement


class EngramGate(nn.Module):
    """x + sigmoid(sign(d) · √max(|d|, clamp_value)) · v, with d the scaled product of normalized x and k.

    See `tk_modeling.engram_gate`. Source: Engram, arXiv 2601.07372.

    Args:
        hidden: H, channels of a stream: a multiple of 64, up to 16384.
        mhc_mult: m, the residual streams, 1 to 8.
        eps: of both norms.
        clamp_value: lower bound of |d|.
        device: of the parameters.
        dtype: of the parameters, float32 or bfloat16; None for torch's default.

    Parameters `weight_hidden` and `weight_embed`, the weights (m, H) of the norms of x and of k, are ones at first.
    """

    def __init__(
        self,
        hidden: int,
        *,
        mhc_mult: int = 4,
        eps: float = 1e-6,
        clamp_value: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(hidden, mhc_mult)
        check_numbers(eps=eps, clamp_value=clamp_value)
        check_placement(device, dtype)
        self.hidden = hidden
        self.mhc_mult = mhc_mult
        self.eps = eps
        self.clamp_value = clamp_value
        self.weight_hidden = nn.Parameter(torch.empty(mhc_mult, hidden, device=device, dtype=dtype))
        self.weight_embed = nn.Parameter(torch.empty(mhc_mult, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both weights to ones."""
        nn.init.ones_(self.weight_hidden)
        nn.init.ones_(self.weight_embed)

    def forward(self, hidden_states: Tensor, k: Tensor, v: Tensor, *, image_token_mask: Tensor | None = None) -> Tensor:
        """hidden_states and k (..., m, H) and v (..., H), bfloat16, and bool image_token_mask (...) → (..., m, H)."""
        weights = self.weight_hidden, self.weight_embed
        return engram_gate(hidden_states, k, v, *weights, self.clamp_value, self.eps, image_token_mask=image_token_mask)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.hidden}, mhc_mult={self.mhc_mult}, eps={self.eps}, clamp_value={self.clamp_value}"


def check_sizes(hidden: int, mhc_mult: int) -> None:
    """Raise TypeError or ValueError unless the kernels serve H channels and m streams."""
    check.in_range("hidden", hidden, 64, 16384)
    check.multiple_of("hidden", hidden, 64)
    check.in_range("mhc_mult", mhc_mult, 1, 8)
