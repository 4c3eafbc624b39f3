"""Reference of mhc_pre_broadcast."""

from math import isqrt

from torch import Tensor

from tk_mhc import reference
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.reference.fused.mhc_pre_big_fuse import from_mixes


def mhc_pre_broadcast(
    hidden: Tensor,
    fn_folded: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first mhc_pre of a model, whose streams are all `hidden`: expand_to_mhc, then mhc_pre_big_fuse.

    fn_folded is fn with the columns of all streams added, by `mhc_fold_fn`; so only one stream is projected:
    mixes = (hidden · fn_foldedᵀ) · rsqrt(mean(hidden²) + rms_eps). n_splits changes only the order of that sum, which
    here is PyTorch's. Returns (residual, post, comb, layer_input).
    """
    # fn_folded has m(m + 2) = (m + 1)² - 1 rows.
    mhc_mult = isqrt(fn_folded.shape[0] + 1) - 1
    residual = reference.expand_to_mhc(hidden, mhc_mult)
    arguments = PreArguments(
        mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    )
    mixes = reference.mhc_pre_norm_fn(hidden.unsqueeze(-2), fn_folded, None, rms_eps, n_splits=n_splits)
    return residual, *from_mixes(mixes, residual, arguments, PreOptions())
