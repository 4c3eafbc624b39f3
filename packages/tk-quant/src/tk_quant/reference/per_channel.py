"""Casts by channel in plain PyTorch: `reference.cast` with blocks of one channel."""

import torch

from tk_core.reference.scales import pack_scales
from tk_core.scales import ScaleLayout
from tk_quant.reference.formats import dequantize
from tk_quant.reference.quantizer import cast
from tk_quant.reference.transpose import transpose


def per_channel_cast(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_channel_cast."""
    x_block_size = None if isinstance(x, torch.Tensor) else (1, num_per_channels)
    data, sf = cast(x, fmt, (num_per_tokens, 1), None, x_block_size, round_sf, sf_clamp_min=sf_clamp_min)
    if not use_packed_ue8m0:
        return data, sf
    # Words of four exponents, as the column-major layout has them, but along tokens.
    words = pack_scales(sf.t().contiguous(), ScaleLayout.PACKED_UE8M0)
    return data, words.t().contiguous()


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
