"""mhc_post_pre: the boundary between two sublayers: mhc_post of one and mhc_pre_big_fuse of the next.

    new_residual = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    post, comb, layer_input = mhc_pre_big_fuse(new_residual, fn, …)

with the bits of these two. For few tokens of four streams on Hopper in two launches, lib/post_project.py and
lib/pre_fuse.py; otherwise mhc_post's kernel and those of mhc_pre_big_fuse. Source: arXiv 2512.24880.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.views import aligned, flat
from tk_mhc.lib.post_project import launch_post_sums, takes_post_project
from tk_mhc.lib.pre_fuse import check_pre_fuse, launch_pre_fuse, named_numbers, new_results
from tk_mhc.lib.projection import check_n_splits, launch_sums
from tk_mhc.lib.tokens import check_streams
from tk_mhc.post.mhc_post import launch_post


@op(
    "tk_mhc::mhc_post_pre_out",
    mutates=("new_residual", "post", "comb", "layer_input", "next_pre_mix"),
    reference="mhc_post_pre",
    translate=lambda call: {**named_numbers(call.numbers), "shifted": call.next_pre_mix is not None},
)
def _mhc_post_pre_out(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    norm_weight: Tensor | None,
    layer_norm_weight: Tensor | None,
    pre_mix: Tensor | None,
    new_residual: Tensor,
    post: Tensor,
    comb: Tensor,
    layer_input: Tensor,
    next_pre_mix: Tensor | None,
    numbers: list[float],
    layer_norm_eps: float,
    sinkhorn_repeat: int,
    n_splits: int,
) -> None:
    num_tokens, mhc_mult, hidden = residual.shape
    if num_tokens == 0:
        return
    before = (x, residual, post_layer_mix, comb_res_mix)
    fn = aligned(fn)
    norm_weight = None if norm_weight is None else aligned(norm_weight)
    if takes_post_project(num_tokens, mhc_mult, hidden, n_splits, x.device):
        sums = launch_post_sums(*before, fn, norm_weight, n_splits, new_residual)
    else:
        launch_post(*before, new_residual)
        sums = launch_sums(new_residual.view(num_tokens, -1), fn, norm_weight, n_splits)
    launch_pre_fuse(
        new_residual,
        sums,
        mhc_scale,
        mhc_base,
        numbers,
        sinkhorn_repeat,
        (post, comb, layer_input, next_pre_mix),
        (layer_norm_weight, layer_norm_eps),
        pre_mix,
    )


@replayable
def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
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
) -> tuple[Tensor, ...]:
    """The boundary between two sublayers: mhc_post of the one, then mhc_pre_big_fuse of the other, with their bits.

    Source: arXiv 2512.24880.

    Args:
        x: output of the sublayer before, bfloat16 (..., H), contiguous.
        residual: bfloat16 (..., m, H); m is 2, 4 or 8, H a multiple of 64, 64 to 8192. If it is not contiguous, it is
            copied first.
        post_layer_mix: float32 (..., m, 1), contiguous: post of the sublayer before.
        comb_res_mix: float32 (..., m, m), contiguous: its comb.
        fn: float32 (m·(m+2), m·H), contiguous.
        mhc_scale: float32 (3): of pre, post and comb.
        mhc_base: float32 (m·(m+2)): of pre, post and comb.
        rms_eps: added to the mean of squares.
        mhc_pre_eps: added to pre.
        mhc_sinkhorn_eps: added to the softmax and to each sum of a row or column.
        mhc_post_mult_value: factor of post.
        sinkhorn_repeat: iterations, 1 to 1000.
        n_splits: splits of the projection's sum, see `mhc_pre_norm_fn`.
        norm_weight: float32 (m·H), or None for ones.
        layer_norm_weight: bfloat16 or float32 (H): the layer input is rounded to bfloat16, normalized by its root mean
            square and multiplied by it. None: no norm.
        layer_norm_eps: added to the mean of squares there.
        shifted: collapse by `pre_mix` instead of this residual's own pre, which is returned for the next sublayer.
        pre_mix: float32 (..., m, 1), with `shifted` only: next_pre_mix of the sublayer before; None: stream 0.

    Returns:
        new_residual: bfloat16 (..., m, H).
        post: float32 (..., m, 1).
        comb: float32 (..., m, m), after Sinkhorn.
        layer_input: bfloat16 (..., H).
        next_pre_mix: float32 (..., m, 1), with `shifted` only.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    leading, mhc_mult, hidden = check_streams("residual", residual, layout="any")
    device, width = residual.device, mhc_mult * hidden
    check.tensor("x", x, (torch.bfloat16,), (*leading, hidden), device=device)
    check.tensor("post_layer_mix", post_layer_mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
    check.tensor("comb_res_mix", comb_res_mix, (torch.float32,), (*leading, mhc_mult, mhc_mult), device=device)
    check.tensor("fn", fn, (torch.float32,), (mhc_mult * (mhc_mult + 2), width), device=device)
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, (torch.float32,), (width,), device=device)
    numbers = check_pre_fuse(
        mhc_scale,
        mhc_base,
        (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value),
        sinkhorn_repeat,
        (leading, mhc_mult, hidden),
        device,
        (layer_norm_weight, layer_norm_eps),
        (shifted, pre_mix),
    )
    n_splits = check_n_splits(n_splits, width)
    new_residual = x.new_empty((*leading, mhc_mult, hidden))
    post, comb, layer_input, next_pre = new_results(x, leading, mhc_mult, shifted)
    _mhc_post_pre_out(
        flat(x, 1),
        flat(residual.contiguous(), 2),
        flat(post_layer_mix, 2),
        flat(comb_res_mix, 2),
        fn,
        mhc_scale,
        mhc_base,
        norm_weight,
        layer_norm_weight,
        None if pre_mix is None else flat(pre_mix, 2),
        flat(new_residual, 2),
        flat(post, 2),
        flat(comb, 2),
        flat(layer_input, 1),
        None if next_pre is None else flat(next_pre, 2),
        numbers,
        float(layer_norm_eps),
        sinkhorn_repeat,
        n_splits,
    )
    results = (new_residual, post, comb, layer_input)
    return results if next_pre is None else (*results, next_pre)
