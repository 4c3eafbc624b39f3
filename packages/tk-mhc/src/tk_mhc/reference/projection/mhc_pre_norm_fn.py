"""Reference of mhc_pre_norm_fn."""

import torch
from torch import Tensor


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int | None = None,
    *,
    return_rstd: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """mixes = (x · (fn · norm_weight)ᵀ) · rstd with rstd = rsqrt(mean(x²) + eps), x the m·H channels of a token.

    In the dtype of mhc_fn: float32, or float64. Returns mixes (..., rows of mhc_fn), and with return_rstd also rstd
    (...). fuse_grad_acc changes nothing, n_splits only the order of the sum, which here is PyTorch's.
    """
    x = residual.flatten(-2).to(mhc_fn.dtype)
    fn = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    rstd = torch.rsqrt(x.square().mean(-1) + mhc_norm_eps)
    mixes = (x @ fn.mT) * rstd.unsqueeze(-1)
    return (mixes, rstd) if return_rstd else mixes
