"""Reference of per_channel_cast: `reference.cast` with blocks of one channel."""

import torch

from tk_quant.reference.lib.cast import cast


def per_channel_cast(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False, *, sf_clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast."""
    return cast(x, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
