"""Reference of mhc_post."""

import torch
from torch import Tensor


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """out[n] = post[n] · x + Σ_k comb[k, n] · residual[k] in float32 (float64 for float64 x), rounded to x's dtype.

    The product with x is rounded. Then each step is a fused multiply-add, k ascending: a product of float32 and
    bfloat16 is exact in float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = post_layer_mix.to(dtype) * x.to(dtype).unsqueeze(-2)
    for k in range(residual.shape[-2]):
        product = comb_res_mix[..., k, :, None].double() * residual[..., k, None, :].double()
        total = (total.double() + product).to(dtype)
    total = total.to(x.dtype)
    return total if out is None else out.copy_(total)
