"""Reference of mhc_pre_big_fuse, and the part that other ops of the family share."""

import torch
from torch import Tensor

from tk_mhc import reference
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int | None = None,
    norm_weight: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    layer_norm_eps: float = 1e-6,
    shifted: bool = False,
    pre_mix: Tensor | None = None,
    mhc_post_eps: float = 0.0,
) -> tuple[Tensor | None, ...]:
    """mhc_pre_norm_fn, then `from_mixes` of the mixes."""
    arguments = PreArguments(
        *(mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat),
        mhc_post_eps,
    )
    options = PreOptions(layer_norm_weight, layer_norm_eps, shifted, pre_mix)
    mixes = reference.mhc_pre_norm_fn(residual, fn, norm_weight, rms_eps, n_splits=n_splits)
    return from_mixes(mixes, residual, arguments, options)


def from_mixes(
    mixes: Tensor, residual: Tensor, arguments: PreArguments, options: PreOptions
) -> tuple[Tensor | None, ...]:
    """mhc_pre_split_mixes, sinkhorn_normalize, mhc_pre_apply_mix and, with a weight, the layer norm.

    If shifted, the streams are collapsed with pre_mix, or to stream 0 where it is None, and pre is the last result.
    Returns (post, comb, layer_input) or (post, comb, layer_input, pre).
    """
    scale, base, _, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat, post_eps = arguments
    layer_norm_weight, layer_norm_eps, shifted, pre_mix = options
    mhc_mult = residual.shape[-2]
    numbers = mhc_mult, post_mult_value, pre_eps
    pre, post, comb = reference.mhc_pre_split_mixes(mixes, scale, base, *numbers, mhc_post_eps=post_eps)
    if comb is not None:
        comb = reference.sinkhorn_normalize(comb, sinkhorn_repeat, sinkhorn_eps)
    if shifted and pre_mix is None:
        layer_input = residual[..., 0, :].clone(memory_format=torch.contiguous_format)
    else:
        layer_input = reference.mhc_pre_apply_mix(residual, pre if pre_mix is None else pre_mix)
    if layer_norm_weight is not None:
        layer_input = _layer_norm(layer_input, layer_norm_weight, layer_norm_eps)
    return (post, comb, layer_input, pre) if shifted else (post, comb, layer_input)


def _layer_norm(layer_input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y · rsqrt(mean(y²) + eps) · weight, in float32 and rounded for a bfloat16 y."""
    y = layer_input.float() if layer_input.dtype == torch.bfloat16 else layer_input
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * rstd * weight.to(y.dtype)).to(layer_input.dtype)
