"""mhc_post_pre: the boundary between two sublayers: mhc_post of one and mhc_pre_big_fuse of the next.

    new_residual = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    post, comb, layer_input = mhc_pre_big_fuse(new_residual, fn, …)

with the bits of these two. For few tokens of four streams on Hopper in two launches, lib/post_project.py and
lib/pre_fuse.py; otherwise mhc_post's kernel and those of mhc_pre_big_fuse. Source: arXiv 2512.24880.
"""

from torch import Tensor

from tk_core import check
from tk_core.op import launching, new, op
from tk_core.views import flat
from tk_mhc.lib.post_project import launch_post_sums, takes_post_project
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.lib.pre_fuse import launch_pre_fuse, new_results
from tk_mhc.lib.projection import check_projection, launch_sums
from tk_mhc.lib.tokens import check_post
from tk_mhc.post.mhc_post import launch_post


@op
def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor | None,
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
    """The boundary between two sublayers: mhc_post of the one, then mhc_pre_big_fuse of the other, with their bits.

    Source: arXiv 2512.24880. With 2m rows of fn neither sublayer has a comb: a model that does not mix its streams.

    Args:
        x: output of the sublayer before, bfloat16 (..., H), contiguous.
        residual: bfloat16 (..., m, H); m is 2, 4 or 8, H a multiple of 64, 64 to 8192. If it is not contiguous, it is
            copied first.
        post_layer_mix: float32 (..., m, 1), contiguous: post of the sublayer before.
        comb_res_mix: float32 (..., m, m), contiguous: its comb; None where fn has 2m rows.
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
        new_residual: bfloat16 (..., m, H).
        post: float32 (..., m, 1).
        comb: float32 (..., m, m), after Sinkhorn; or None.
        layer_input: bfloat16 (..., H).
        next_pre_mix: float32 (..., m, 1), with `shifted` only.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    streams, before = check_post(x, residual, post_layer_mix, comb_res_mix)
    projection = check_projection(streams, fn, norm_weight, n_splits)
    arguments = PreArguments(
        *(mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat),
        mhc_post_eps,
    ).checked(streams, fn.shape[0])
    options = PreOptions(layer_norm_weight, layer_norm_eps, shifted, pre_mix).checked(streams)
    has_comb = arguments.sinkhorn_repeat is not None
    if has_comb:
        check.require_type(comb_res_mix is not None, "comb_res_mix", "a tensor, as fn has rows of comb", comb_res_mix)
    else:
        check.require(comb_res_mix is None, "comb_res_mix", "None, as fn has no rows of comb", "a tensor")
    new_residual = new(x.new_empty, (*streams.leading, streams.mhc_mult, streams.hidden))
    results = new_results(x, streams, has_comb, shifted)
    if launching(new_residual, results):
        written = flat(new_residual, 2)
        if takes_post_project(written, projection.n_splits):
            sums = launch_post_sums(before, projection, written)
        else:
            launch_post(before, written)
            sums = launch_sums(written.flatten(1), projection)
        launch_pre_fuse(written, sums, arguments, options, results)
    return new_residual, *results.present()
