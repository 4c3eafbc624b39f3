"""Reference of expand_to_mhc_bwd."""

import torch
from torch import Tensor


def expand_to_mhc_bwd(d_o: Tensor) -> Tensor:
    """Σ_s d_o[..., s, :] from stream 0 upwards in float32 (float64 if d_o is float64), rounded to d_o's dtype."""
    total, *streams = d_o.to(torch.promote_types(d_o.dtype, torch.float32)).unbind(-2)
    for stream in streams:
        total = total + stream
    return d_o.new_empty(total.shape).copy_(total)
