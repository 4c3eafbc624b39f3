"""per_token_and_channel_cast in plain PyTorch: `reference.cast` twice."""

import torch

from tk_quant.reference.quantizer import cast
from tk_quant.reference.transpose import transpose


def per_token_and_channel_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int = 128,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    transpose_channel_data: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """See tk_quant.per_token_and_channel_cast."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    by_token = cast(x, fmt, (1, num_per_channels), None, None, *flags, sf_clamp_min=sf_clamp_min)
    data, sf = cast(x, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return by_token, (transpose(data) if transpose_channel_data else data, sf)
