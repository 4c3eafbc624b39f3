"""Reference of per_channel_cast_and_transpose: per_channel_cast, then transpose."""

import torch

from tk_quant.reference.layout.transpose import transpose
from tk_quant.reference.per_channel.per_channel_cast import per_channel_cast


def per_channel_cast_and_transpose(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False, *, sf_clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast_and_transpose."""
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf, sf_clamp_min=sf_clamp_min)
    return transpose(data), sf
