"""mhc_pre_norm_fn: RMS norm over a token's streams, then the projection on the rows of fn that gives the raw mixes.

    rstd[t]     = rsqrt(Σ_c x[t, c]² / (m·H) + eps)
    mixes[t, j] = (Σ_c x[t, c] · fn[j, c] · norm_weight[c]) · rstd[t]

lib/projection.py has the product, its arithmetic and the order of the sums. For many tokens each of its thread blocks
walks all splits of the channels and writes mixes; for few they share the splits, and a second kernel adds these up. The
bits are the same.
"""

from torch import Tensor

from tk_core import check
from tk_core.kernel import new_workspace
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.views import flat
from tk_mhc.lib.projection import check_n_splits, launch_projection, new_sums, takes_all_splits
from tk_mhc.lib.projection_config import Projection
from tk_mhc.lib.sum_splits import launch_sum_splits
from tk_mhc.lib.tokens import check_fn, check_norm_weight, check_streams


@op(
    "tk_mhc::mhc_pre_norm_fn_out",
    mutates=("mixes", "rstd"),
    reference="mhc_pre_norm_fn",
    translate=lambda _: {"return_rstd": True},
)
def _mhc_pre_norm_fn_out(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    n_splits: int,
    mixes: Tensor,
    rstd: Tensor,
) -> None:
    num_tokens, x = residual.shape[0], residual.flatten(1)
    if num_tokens == 0:
        return
    projection = Projection(mhc_fn, mhc_norm_weight, n_splits)
    if takes_all_splits(num_tokens, n_splits, x.device):
        launch_projection("mixes", x, projection, mixes.unsqueeze(0), rstd.unsqueeze(0), mhc_norm_eps)
    else:
        mul, sqrsum = new_sums(mhc_fn, n_splits, num_tokens)
        launch_projection("partials", x, projection, mul, sqrsum)
        launch_sum_splits(mul, sqrsum, mixes, rstd, x.shape[1], mhc_norm_eps)


@replayable
def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int | None = None,
    *,
    return_rstd: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize a token's streams by their root mean square and project them on the rows of mhc_fn.

    mixes = (x · (mhc_fn · mhc_norm_weight)ᵀ) · rstd with rstd = rsqrt(mean(x²) + mhc_norm_eps), x the m·H channels of a
    token. Source: arXiv 2512.24880.

    A weight counts with 16 bits of mantissa (two bfloat16), sums are float32: closer to float64 than TF32 with its 11.
    The channels' blocks of 64 are shared out to `n_splits` splits, which are summed one by one and then together,
    ascending. A token's bits depend on nothing else: it has the same alone and in a batch of any size.

    Args:
        residual: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        mhc_fn: float32 (m·(m+2), m·H), or (m, m·H) for the head; contiguous.
        mhc_norm_weight: float32 (m·H), contiguous, or None for ones.
        mhc_norm_eps: added to the mean of squares.
        fuse_grad_acc: taken as TileKernels takes it; changes nothing.
        n_splits: at least 1; more than m·H/64 count as m·H/64. None: a number that follows from m·H.
        return_rstd: whether to return rstd, too.

    Returns:
        mixes: float32 (..., rows of mhc_fn).
        rstd: float32 (...), only with `return_rstd`.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    check.flag("fuse_grad_acc", fuse_grad_acc)
    check.flag("return_rstd", return_rstd)
    streams = check_streams("residual", residual)
    num_rows = check_fn("mhc_fn", mhc_fn, streams)
    check_norm_weight("mhc_norm_weight", mhc_norm_weight, streams)
    check.number("mhc_norm_eps", mhc_norm_eps, at_least=0)
    n_splits = check_n_splits(n_splits, streams.width)
    mixes = mhc_fn.new_empty((*streams.leading, num_rows))
    rstd = mhc_fn.new_empty(streams.leading) if return_rstd else new_workspace(mhc_fn, streams.leading)
    weights = (mhc_fn, mhc_norm_weight)
    _mhc_pre_norm_fn_out(flat(residual, 2), *weights, float(mhc_norm_eps), n_splits, flat(mixes, 1), rstd.view(-1))
    return (mixes, rstd) if return_rstd else mixes
