"""Casts back in plain PyTorch."""

import torch

from tk_quant.cast.format import OUT_DTYPES
from tk_quant.reference.formats import dequantize


def cast_back(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int] = (32, 32),
    x_special_fmt: str | None = None,
    *,
    tensor_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """data * sf of its block, rounded to float32, then to the output type; any NaN is 0x7fffffff (bf16: 0x7fff)."""
    if x_special_fmt not in (None, "e5m6"):
        raise ValueError(f"x_special_fmt: expected None or 'e5m6', got {x_special_fmt!r}")
    out = dequantize(x, x_block_size, x_special_fmt, tensor_sf).to(OUT_DTYPES[fmt])
    # A GPU writes every NaN like this; a CPU keeps its sign and payload.
    if fmt == "bf16":
        out.view(torch.int16).masked_fill_(out.isnan(), 0x7FFF)
    else:
        out.view(torch.int32).masked_fill_(out.isnan(), 0x7FFFFFFF)
    return out


def cast_back_e5m6(x: tuple[torch.Tensor, torch.Tensor], fmt: str, x_block_size: tuple[int, int]) -> torch.Tensor:
    """See tk_quant.cast_back_e5m6."""
    return cast_back(x, fmt, x_block_size, "e5m6")


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
