"""Reference of mhc_pre_apply_mix_bwd."""

import torch
from torch import Tensor


def mhc_pre_apply_mix_bwd(d_o: Tensor, x: Tensor, mix: Tensor, *, d_x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """d_x[s] = mix[s] · d_o (+ the given d_x), rounded to x's dtype; d_mix[s] = Σ_i d_o[i] · x[s, i].

    A given d_x is overwritten with the result. d_o (..., H), x and d_x (..., m, H), mix and d_mix (..., m, 1); computed
    in float32, or float64 if x is float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad = d_o.to(dtype).unsqueeze(-2)
    product = mix * grad
    if d_x is None:
        d_x = x.new_empty(x.shape).copy_(product)
    else:
        d_x.copy_(product + d_x.to(dtype))
    return d_x, (grad * x.to(dtype)).sum(-1, keepdim=True)
