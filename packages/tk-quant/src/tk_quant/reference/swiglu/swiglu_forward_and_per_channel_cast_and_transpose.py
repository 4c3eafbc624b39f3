"""Reference of swiglu_forward_and_per_channel_cast_and_transpose."""

import torch

from tk_quant.reference.layout.transpose import transpose
from tk_quant.reference.lib.cast import cast
from tk_quant.reference.lib.swiglu import swiglu_forward


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.swiglu_forward_and_per_channel_cast_and_transpose."""
    activation = swiglu_forward(x, swiglu_clamp_value).to(torch.bfloat16)
    data, sf = cast(activation, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return data if without_transpose else transpose(data), sf
