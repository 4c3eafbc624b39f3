"""Reference of mhc_post."""

import torch
from torch import Tensor

from tk_core.reference.fma import fma


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """out[n] = post[n] · x + Σ_k comb[k, n] · residual[k] in float32 (float64 for float64 x), rounded to x's dtype.

    The product with x is rounded. Then each step is a fused multiply-add, k ascending. comb None is the identity.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if comb_res_mix is None:
        comb_res_mix = torch.eye(residual.shape[-2], dtype=dtype, device=x.device)
    total = post_layer_mix.to(dtype) * x.to(dtype).unsqueeze(-2)
    for k in range(residual.shape[-2]):
        total = fma(comb_res_mix[..., k, :, None], residual[..., k, None, :], total)
    total = total.to(x.dtype)
    return total if out is None else out.copy_(total)
