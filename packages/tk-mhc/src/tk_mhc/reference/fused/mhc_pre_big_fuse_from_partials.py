"""Reference of mhc_pre_big_fuse_from_partials."""

import torch
from torch import Tensor

from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.reference.fused.mhc_pre_big_fuse import from_mixes


def mhc_pre_big_fuse_from_partials(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    *,
    layer_norm_weight: Tensor | None = None,
    layer_norm_eps: float = 1e-6,
    shifted: bool = False,
    pre_mix: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """mhc_pre_big_fuse from the partial sums of mhc_prenorm_gemm, which are added from the first split to the last.

    mixes = Σ_s mul[s] · rsqrt(Σ_s sqrsum[s] / (m·H) + rms_eps).
    """
    *leading, mhc_mult, hidden = residual.shape
    rstd = torch.rsqrt(_sum_of_splits(gemm_out_sqrsum) / (mhc_mult * hidden) + rms_eps)
    mixes = _sum_of_splits(gemm_out_mul) * rstd.unsqueeze(-1)
    arguments = PreArguments(
        mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    )
    options = PreOptions(layer_norm_weight, layer_norm_eps, shifted, pre_mix)
    return from_mixes(mixes.view(*leading, mixes.shape[-1]), residual, arguments, options)


def _sum_of_splits(partials: Tensor) -> Tensor:
    """Sum over dimension 0, ascending."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total
