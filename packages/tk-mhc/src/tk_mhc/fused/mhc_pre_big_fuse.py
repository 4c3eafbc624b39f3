"""mhc_pre_big_fuse: all that comes before a sublayer.

    mixes           = mhc_pre_norm_fn(residual, fn, norm_weight, rms_eps)
    pre, post, comb = mhc_pre_split_mixes(mixes, mhc_scale, mhc_base)
    comb            = sinkhorn_normalize(comb)
    layer_input     = mhc_pre_apply_mix(residual, pre)

The projection (lib/projection.py) is one launch, up to three from 256 tokens on; the rest (lib/pre_fuse.py) is one.
They are made of the same macros as the separate ops, so the results have the same bits. Source: arXiv 2512.24880; the
shifted form and the layer norm are those of vLLM's mhc_pre_delayed and of its fused norm.
"""

from torch import Tensor

from tk_core.op import launching, op
from tk_core.views import flat
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.lib.pre_fuse import launch_pre_fuse, new_results
from tk_mhc.lib.projection import check_projection, launch_sums
from tk_mhc.lib.tokens import check_streams


@op
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
    """Everything before a sublayer: the mixes of each token, Sinkhorn, and the collapse of its streams.

    mhc_pre_norm_fn, mhc_pre_split_mixes, sinkhorn_normalize and mhc_pre_apply_mix, with the bits of these ops one after
    the other at the same n_splits; optionally a layer norm after them. Source: arXiv 2512.24880. With 2m rows of fn
    there is no comb, and no Sinkhorn: a model that does not mix its streams (HY-V4).

    Args:
        residual: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        fn: float32 (m·(m+2), m·H), or (2m, m·H) without comb; contiguous.
        mhc_scale: float32 (3): of pre, post and comb; (2) without comb.
        mhc_base: float32 (m·(m+2)): of pre, post and comb; (2m) without comb.
        rms_eps: added to the mean of squares.
        mhc_pre_eps: added to pre.
        mhc_sinkhorn_eps: added to the softmax and to each sum of a row or column of comb.
        mhc_post_mult_value: factor of post.
        sinkhorn_repeat: iterations, 1 to 1000.
        n_splits: splits of the projection's sum, see `mhc_pre_norm_fn`.
        norm_weight: float32 (m·H), or None for ones.
        layer_norm_weight: bfloat16 or float32 (H): the layer input is rounded to bfloat16, normalized by its root mean
            square and multiplied by it. None: no norm.
        layer_norm_eps: added to the mean of squares there.
        shifted: collapse by `pre_mix` instead of this residual's own pre, which is returned for the next sublayer.
        pre_mix: float32 (..., m, 1), with `shifted` only: next_pre_mix of the sublayer before; None: stream 0.
        mhc_post_eps: added to post.

    Returns:
        post: float32 (..., m, 1).
        comb: float32 (..., m, m), after Sinkhorn; or None.
        layer_input: bfloat16 (..., H).
        next_pre_mix: float32 (..., m, 1), with `shifted` only.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    streams = check_streams("residual", residual)
    projection = check_projection(streams, fn, norm_weight, n_splits)
    arguments = PreArguments(
        *(mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat),
        mhc_post_eps,
    ).checked(streams, fn.shape[0])
    options = PreOptions(layer_norm_weight, layer_norm_eps, shifted, pre_mix).checked(streams)
    results = new_results(residual, streams, arguments.sinkhorn_repeat is not None, shifted)
    if launching(results):
        x = flat(residual, 2)
        launch_pre_fuse(x, launch_sums(x.flatten(1), projection), arguments, options, results)
    return results.present()
