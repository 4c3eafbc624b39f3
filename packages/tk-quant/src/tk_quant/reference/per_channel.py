"""Casts by channel in plain PyTorch: `reference.cast` with blocks of one channel."""

import torch

from tk_quant.reference.formats import dequantize
from tk_quant.reference.quantizer import cast
from tk_quant.reference.transpose import transpose


def per_channel_cast(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False, *, sf_clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast."""
    return cast(x, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)


def per_channel_cast_and_transpose(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False, *, sf_clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast_and_transpose."""
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf, sf_clamp_min=sf_clamp_min)
    return transpose(data), sf


def per_channel_cast_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast_fused: dequantize, gather, then cast."""
    values = x if isinstance(x, torch.Tensor) else dequantize(x, (1, num_per_channels))
    if pos_to_token is not None:
        is_real = (pos_to_token >= 0) & (pos_to_token < values.shape[0])
        gathered = values.new_zeros((pos_to_token.shape[0], values.shape[1]))
        gathered[is_real] = values[pos_to_token[is_real].to(torch.int64)]
        values = gathered
    return cast(values, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
