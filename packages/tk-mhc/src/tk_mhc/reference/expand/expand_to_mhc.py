"""Reference of expand_to_mhc."""

import torch
from torch import Tensor


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """mhc_mult copies of hidden (..., H) as streams (..., mhc_mult, H): `out`, or a new tensor."""
    streams = torch.stack([hidden] * mhc_mult, dim=-2)
    return streams if out is None else out.copy_(streams)
