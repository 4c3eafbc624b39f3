"""References of per_channel_cast and per_channel_cast_and_transpose: `reference.cast` with blocks of one channel."""

import torch

from tk_quant.reference.cast import cast
from tk_quant.reference.transpose import transpose


def per_channel_cast(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast."""
    return cast(x, fmt, (num_per_tokens, 1), round_sf=round_sf)


def per_channel_cast_and_transpose(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast_and_transpose."""
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf)
    return transpose(data), sf
