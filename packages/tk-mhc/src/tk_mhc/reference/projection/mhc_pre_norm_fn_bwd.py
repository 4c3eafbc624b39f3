"""Reference of mhc_pre_norm_fn_bwd."""

from torch import Tensor


def mhc_pre_norm_fn_bwd(
    d_mixes: Tensor,
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mixes: Tensor,
    rstd: Tensor,
    *,
    d_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(d_residual, d_fn, d_norm_weight or None) of `mhc_pre_norm_fn`, in the dtype of mhc_fn: float32, or float64.

    With F = mhc_fn · mhc_norm_weight and g = rstd · d_mixes: d_residual = g · F - x · rstd² / (m·H) · Σ_j d_mixes_j ·
    mixes_j, rounded to the residual's dtype after adding the given d_residual, which is overwritten; with d_F = gᵀ · x:
    d_fn = d_F · mhc_norm_weight and d_norm_weight = Σ_j d_F_j · mhc_fn_j.
    """
    num_rows, width = mhc_fn.shape
    x = residual.reshape(-1, width).to(mhc_fn.dtype)
    f = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    g = (rstd.unsqueeze(-1) * d_mixes).view(-1, num_rows)
    factor = rstd.square() / width * (d_mixes * mixes).sum(-1)
    d_x = (g @ f - x * factor.view(-1, 1)).view(residual.shape)
    if d_residual is None:
        d_residual = residual.new_empty(residual.shape).copy_(d_x)
    else:
        d_residual.copy_(d_x + d_residual.to(d_x.dtype))
    d_f = g.mT @ x
    if mhc_norm_weight is None:
        return d_residual, d_f, None
    return d_residual, d_f * mhc_norm_weight, (d_f * mhc_fn).sum(0)
