"""per_token_cast_and_cast_back in plain PyTorch."""

import torch

from tk_quant.reference.back import per_token_cast_back
from tk_quant.reference.quantizer import cast


def per_token_cast_and_cast_back(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_e4m3_sf: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> None:
    """See tk_quant.per_token_cast_and_cast_back."""
    pair = cast(x, fmt, (1, num_per_channels), round_sf=round_sf, use_e4m3_sf=use_e4m3_sf)
    back = per_token_cast_back(pair, "bf16" if x.dtype is torch.bfloat16 else "fp32", num_per_channels)
    (x if out is None else out).copy_(back)
