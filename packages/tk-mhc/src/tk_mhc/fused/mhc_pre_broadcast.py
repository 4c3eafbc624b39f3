"""mhc_pre_broadcast: what comes before a model's first sublayer, where all streams are still equal.

    mixes       = x · fn_foldedᵀ · rsqrt(mean(x²) + rms_eps)         x the H channels of one stream, not m·H
    residual    = m copies of hidden
    layer_input = mhc_pre_apply_mix(residual, pre)

and post and comb as in mhc_pre_big_fuse, with its kernels: the projection of width H (lib/projection.py), then the rest
(lib/pre_fuse.py). Source: arXiv 2512.24880, in the form of vLLM's mhc_pre_broadcast.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import launching, new, op
from tk_core.views import flat
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.lib.pre_fuse import launch_pre_fuse, new_results
from tk_mhc.lib.projection import check_n_splits, launch_sums
from tk_mhc.lib.projection_config import Projection
from tk_mhc.lib.tokens import MHC_MULTS, Streams, check_hidden


@op
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
    num_rows, _ = check.tensor("fn_folded", fn_folded, (torch.float32,), ("rows", size), device=hidden.device)
    check.one_of("rows of fn_folded", num_rows, [m * (m + 2) for m in MHC_MULTS])
    mhc_mult = next(m for m in MHC_MULTS if m * (m + 2) == num_rows)
    streams = Streams(tuple(leading), mhc_mult, size, hidden.device)
    arguments = PreArguments(
        mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    ).checked(streams, num_rows)
    n_splits = check_n_splits(n_splits, size)
    residual = new(hidden.new_empty, (*leading, mhc_mult, size))
    results = new_results(hidden, streams, has_comb=True, shifted=False)
    if launching(residual, results):
        x = flat(hidden, 1)
        sums = launch_sums(x, Projection(fn_folded, None, n_splits))
        launch_pre_fuse(x.unsqueeze(1), sums, arguments, PreOptions(), results, expanded=flat(residual, 2))
    return residual, *results.present()
