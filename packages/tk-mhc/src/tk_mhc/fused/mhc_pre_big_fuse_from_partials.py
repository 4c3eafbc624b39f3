"""mhc_pre_big_fuse_from_partials: all that comes before a sublayer, from another kernel's partial products on.

    mixes = Σ_s gemm_out_mul[s] · rsqrt(Σ_s gemm_out_sqrsum[s] / (m·H) + rms_eps)       splits ascending

and from there as mhc_pre_big_fuse, in one launch (lib/pre_fuse.py). Source: arXiv 2512.24880.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import launching, op
from tk_core.views import flat
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.lib.pre_fuse import launch_pre_fuse, new_results
from tk_mhc.lib.tokens import check_streams, mix_counts


@op
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
    """Everything before a sublayer, given partial products such as those of mhc_prenorm_gemm.

    The splits are added up ascending; what follows has the bits of `mhc_pre_big_fuse` at as many splits.
    Source: arXiv 2512.24880.

    Args:
        gemm_out_mul: float32 (S, T, m·(m+2)), contiguous; S at least 1, T the product of residual's leading dimensions.
        gemm_out_sqrsum: float32 (S, T), contiguous.
        mhc_scale: float32 (3): of pre, post and comb.
        mhc_base: float32 (m·(m+2)): of pre, post and comb.
        residual: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        rms_eps: added to the mean of squares.
        mhc_pre_eps: added to pre.
        mhc_sinkhorn_eps: added to the softmax and to each sum of a row or column.
        mhc_post_mult_value: factor of post.
        sinkhorn_repeat: iterations, 1 to 1000.
        layer_norm_weight: bfloat16 or float32 (H): the layer input is rounded to bfloat16, normalized by its root mean
            square and multiplied by it. None: no norm.
        layer_norm_eps: added to the mean of squares there.
        shifted: collapse by `pre_mix` instead of this residual's own pre, which is returned for the next sublayer.
        pre_mix: float32 (..., m, 1), with `shifted` only: next_pre_mix of the sublayer before; None: stream 0.

    Returns:
        post: float32 (..., m, 1).
        comb: float32 (..., m, m), after Sinkhorn.
        layer_input: bfloat16 (..., H).
        next_pre_mix: float32 (..., m, 1), with `shifted` only.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    streams = check_streams("residual", residual)
    x = flat(residual, 2)
    num_tokens, device = x.shape[0], streams.device
    num_mixes, _ = mix_counts(streams.mhc_mult)
    shape = ("splits", num_tokens, num_mixes)
    num_splits, _, _ = check.tensor("gemm_out_mul", gemm_out_mul, (torch.float32,), shape, device=device)
    check.require(num_splits >= 1, "splits (dimension 0 of gemm_out_mul)", "at least 1", num_splits)
    check.tensor("gemm_out_sqrsum", gemm_out_sqrsum, (torch.float32,), (num_splits, num_tokens), device=device)
    arguments = PreArguments(
        mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    ).checked(streams, num_mixes)
    options = PreOptions(layer_norm_weight, layer_norm_eps, shifted, pre_mix).checked(streams)
    results = new_results(residual, streams, has_comb=True, shifted=shifted)
    if launching(results):
        launch_pre_fuse(x, (gemm_out_mul, gemm_out_sqrsum), arguments, options, results)
    return results.present()
