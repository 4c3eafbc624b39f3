"""Reference of mhc_pre_apply_mix."""

import torch
from torch import Tensor

from tk_core.reference.fma import fma


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """out = Σ_s mix[s] · x[s] by fused multiply-adds in float32, from 0, streams ascending; rounded to x's dtype.

    x (..., m, H) and mix (..., m, 1); out (..., H), or a new tensor. Float64 is computed in float64, without fma.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-2], x.shape[-1]))
    total = torch.zeros_like(out, dtype=torch.promote_types(x.dtype, torch.float32))
    for stream, weight in zip(x.unbind(-2), mix.unbind(-2), strict=True):
        total = fma(weight, stream, total)
    return out.copy_(total)
