"""mhc_pre_broadcast: what comes before a model's first sublayer, where all streams are still equal.

    mixes       = x · fn_foldedᵀ · rsqrt(mean(x²) + rms_eps)         x the H channels of one stream, not m·H
    residual    = m copies of hidden
    layer_input = mhc_pre_apply_mix(residual, pre)

and post and comb as in mhc_pre_big_fuse, with its kernels: the projection of width H (lib/projection.py), then the rest
(lib/pre_fuse.py). Source: arXiv 2512.24880, in the form of vLLM's mhc_pre_broadcast.
"""

from math import isqrt

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.views import aligned, flat
from tk_mhc.lib.pre_fuse import check_pre_fuse, launch_pre_fuse, named_numbers, new_results
from tk_mhc.lib.projection import check_n_splits, launch_sums
from tk_mhc.lib.tokens import MHC_MULTS, check_hidden


@op(
    "tk_mhc::mhc_pre_broadcast_out",
    mutates=("residual", "post", "comb", "layer_input"),
    reference="mhc_pre_broadcast",
    translate=lambda call: named_numbers(call.numbers),
)
def _mhc_pre_broadcast_out(
    hidden: Tensor,
    fn_folded: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    layer_input: Tensor,
    numbers: list[float],
    sinkhorn_repeat: int,
    n_splits: int,
) -> None:
    if hidden.shape[0] == 0:
        return
    hidden = aligned(hidden)
    sums = launch_sums(hidden, aligned(fn_folded), None, n_splits)
    results = (post, comb, layer_input, None)
    launch_pre_fuse(
        hidden.unsqueeze(1), sums, mhc_scale, mhc_base, numbers, sinkhorn_repeat, results, expanded=residual
    )


@replayable
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
    """Everything before a model's first sublayer: m equal streams of hidden, their mixes, Sinkhorn and the collapse.

    expand_to_mhc, then mhc_pre_big_fuse, but with the folded weight of `mhc_fold_fn` only H channels are projected: the
    mixes are those of the unfolded form within a relative error of 5e-4, not bit for bit. Source: arXiv 2512.24880.

    Args:
        hidden: bfloat16 (..., H), contiguous; H is a multiple of 64, 64 to 8192.
        fn_folded: float32 (m·(m+2), H), contiguous; m, 2, 4 or 8, follows from its rows.
        mhc_scale: float32 (3): of pre, post and comb.
        mhc_base: float32 (m·(m+2)): of pre, post and comb.
        rms_eps: added to the mean of squares.
        mhc_pre_eps: added to pre.
        mhc_sinkhorn_eps: added to the softmax and to each sum of a row or column.
        mhc_post_mult_value: factor of post.
        sinkhorn_repeat: iterations, 1 to 1000.
        n_splits: splits of the projection's sum over H channels, see `mhc_pre_norm_fn`.

    Returns:
        residual: bfloat16 (..., m, H).
        post: float32 (..., m, 1).
        comb: float32 (..., m, m), after Sinkhorn.
        layer_input: bfloat16 (..., H).

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    *leading, size = check.tensor("hidden", hidden, (torch.bfloat16,), (..., "hidden"))
    check_hidden("hidden (last dimension of hidden)", size)
    device = hidden.device
    num_rows, _ = check.tensor("fn_folded", fn_folded, (torch.float32,), ("rows", size), device=device)
    check.one_of("rows of fn_folded", num_rows, [m * (m + 2) for m in MHC_MULTS])
    mhc_mult = isqrt(num_rows + 1) - 1
    streams = (tuple(leading), mhc_mult, size)
    numbers = (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value)
    numbers = check_pre_fuse(mhc_scale, mhc_base, numbers, sinkhorn_repeat, streams, device)
    n_splits = check_n_splits(n_splits, size)
    residual = hidden.new_empty((*leading, mhc_mult, size))
    post, comb, layer_input, _ = new_results(hidden, tuple(leading), mhc_mult, False)
    _mhc_pre_broadcast_out(
        flat(hidden, 1),
        fn_folded,
        mhc_scale,
        mhc_base,
        flat(residual, 2),
        flat(post, 2),
        flat(comb, 2),
        flat(layer_input, 1),
        numbers,
        sinkhorn_repeat,
        n_splits,
    )
    return residual, post, comb, layer_input
