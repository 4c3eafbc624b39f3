"""HyperHead: the last collapse of the streams, before a language model's head."""

import torch
from torch import Tensor

from tk_modeling.float32_state import Float32State
from tk_modeling.mhc.functional import check_hidden, check_mhc_mult, mhc_head
from tk_modeling.mhc.hyper_connection import check_pre_eps, float32_parameter, logit, mix_parameters, reset_projection
from tk_modeling.options import check_flags, check_numbers, check_placement


class HyperHead(Float32State):
    """The weighted sum of the streams, by weights computed from them: (..., m, hidden) to (..., hidden).

    Source: arXiv 2512.24880.

    Args:
        hidden: a multiple of 64, 64 to 8192.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        norm_eps: added to the mean of squares.
        pre_eps: added to the weights, less than 1/m.
        norm_weight: whether the RMS norm of the m·hidden channels has a learned weight.
        device: of the parameters, which are float32.

    Parameters: fn (m, m·hidden), scale (1), base (m) and norm_weight (m·hidden) or None, all float32, also after the
    module was cast.
    """

    def __init__(
        self,
        hidden: int,
        *,
        mhc_mult: int = 4,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        norm_weight: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_mhc_mult(mhc_mult)
        check_hidden("hidden", hidden)
        check_pre_eps(pre_eps, mhc_mult)
        check_numbers(norm_eps=norm_eps)
        check_flags(norm_weight=norm_weight)
        check_placement(device)
        self.hidden = hidden
        self.mhc_mult = mhc_mult
        self.norm_eps = norm_eps
        self.pre_eps = pre_eps
        self.fn = float32_parameter(mhc_mult, mhc_mult * hidden, device=device)
        self.scale = float32_parameter(1, device=device)
        self.base = float32_parameter(mhc_mult, device=device)
        self.norm_weight = float32_parameter(mhc_mult * hidden, device=device) if norm_weight else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin with the mean of the streams, nearly."""
        reset_projection(self.fn, self.scale, self.norm_weight)
        self.base.fill_(logit(1 / self.mhc_mult - self.pre_eps))

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, mhc_mult={self.mhc_mult}, norm_weight={self.norm_weight is not None}, "
            f"norm_eps={self.norm_eps}, pre_eps={self.pre_eps}"
        )

    def forward(self, residual: Tensor) -> Tensor:
        """bfloat16 (..., m, hidden) to (..., hidden). Raises TypeError or ValueError that names the argument."""
        *parameters, norm_weight = mix_parameters(self)
        return mhc_head(
            *(residual, *parameters),
            norm_weight=norm_weight,
            norm_eps=self.norm_eps,
            mhc_mult=self.mhc_mult,
            pre_eps=self.pre_eps,
        )
