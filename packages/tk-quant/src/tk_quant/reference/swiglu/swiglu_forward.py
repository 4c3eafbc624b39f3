"""Reference of swiglu_forward."""

import torch

from tk_quant.reference.lib.swiglu import count_clamped, position_weights, real_positions
from tk_quant.reference.lib.swiglu import swiglu_forward as float32_swiglu

OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def swiglu_forward(
    x: torch.Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """See tk_quant.swiglu_forward."""
    is_real = real_positions(x.shape[0], pos_to_token_topk, topk_weights, pos_to_expert, x.device)
    weight = None
    if pos_to_token_topk is not None:
        weight = position_weights(pos_to_token_topk, topk_weights, is_real)
    if clamped_count is not None:
        clamped_count += count_clamped(x, swiglu_clamp_value, is_real)
    out = float32_swiglu(x, swiglu_clamp_value, weight=weight)
    return out.masked_fill(~is_real.unsqueeze(1), 0).to(OUT_DTYPES[fmt])
