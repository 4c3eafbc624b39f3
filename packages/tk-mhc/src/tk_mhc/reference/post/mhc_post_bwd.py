"""Reference of mhc_post_bwd."""

import torch
from torch import Tensor

from tk_core.reference.fma import fma


def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor | None,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(d_x, d_residual, d_post, d_comb) by their formulas, with sums over channels in float64.

    d_x and d_residual are computed in float32 (float64 for float64 x), one fused multiply-add for each stream of d_o,
    ascending, and rounded to d_o's dtype. comb None is the identity, without a gradient. `fuse_grad_acc` is ignored.
    """
    d_comb = None
    if comb_res_mix is None:
        identity = torch.eye(residual.shape[-2], dtype=post_layer_mix.dtype, device=x.device)
        comb_res_mix = identity.expand(*residual.shape[:-1], -1)
    else:
        d_comb = (residual.double() @ d_o.double().mT).to(comb_res_mix.dtype)
    return (
        _mixed(post_layer_mix.mT, d_o).squeeze(-2),
        _mixed(comb_res_mix, d_o),
        (d_o.double() @ x.double().unsqueeze(-1)).to(post_layer_mix.dtype),
        d_comb,
    )


def _mixed(mixes: Tensor, d_o: Tensor) -> Tensor:
    """Σ_n mixes[..., n] · d_o[n], by fused multiply-adds, n ascending."""
    dtype = torch.promote_types(d_o.dtype, torch.float32)
    total = torch.zeros((*mixes.shape[:-1], d_o.shape[-1]), dtype=dtype, device=d_o.device)
    for n in range(d_o.shape[-2]):
        total = fma(mixes[..., n, None], d_o[..., n, None, :], total)
    return total.to(d_o.dtype)
