"""Reference of per_token_cast_back: that of cast_back with blocks of one token."""

import torch

from tk_quant.reference.dequantize.cast_back import cast_back


def per_token_cast_back(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    *,
    tensor_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """See tk_quant.per_token_cast_back."""
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt, tensor_sf=tensor_sf)
