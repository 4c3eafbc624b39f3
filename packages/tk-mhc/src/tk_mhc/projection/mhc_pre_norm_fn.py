"""mhc_pre_norm_fn: RMS norm over a token's streams, then the projection on the rows of fn that gives the raw mixes.

    rstd[t]     = rsqrt(Σ_c x[t, c]² / (m·H) + eps)
    mixes[t, j] = (Σ_c x[t, c] · fn[j, c] · norm_weight[c]) · rstd[t]

lib/projection.py has the product, its arithmetic and the order of the sums. For many tokens each of its thread blocks
walks all splits of the channels and writes mixes; for few they share the splits, and a second kernel adds these up. The
bits are the same.
"""

from torch import Tensor

from tk_core import check
from tk_core.op import launching, new, op
from tk_core.views import flat
from tk_mhc.lib.projection import check_n_splits, launch_projection, new_sums, takes_all_splits
from tk_mhc.lib.projection_config import Projection
from tk_mhc.lib.sum_splits import launch_sum_splits
from tk_mhc.lib.tokens import check_fn, check_norm_weight, check_streams


@op
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
        mhc_fn: float32 (m·(m+2), m·H), (2m, m·H) without comb, or (m, m·H) for the head; contiguous.
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
    mixes = new(mhc_fn.new_empty, (*streams.leading, num_rows))
    rstd = new(mhc_fn.new_empty, streams.leading) if return_rstd else None
    if launching(mixes, rstd):
        x, projection = residual.view(-1, streams.width), Projection(mhc_fn, mhc_norm_weight, n_splits)
        num_tokens, eps = x.shape[0], float(mhc_norm_eps)
        token_mixes = flat(mixes, 1)
        token_rstd = mhc_fn.new_empty((num_tokens,)) if rstd is None else rstd.view(-1)
        if takes_all_splits(num_tokens, n_splits, x.device):
            launch_projection("mixes", x, projection, token_mixes.unsqueeze(0), token_rstd.unsqueeze(0), eps)
        else:
            mul, sqrsum = new_sums(mhc_fn, n_splits, num_tokens)
            launch_projection("partials", x, projection, mul, sqrsum)
            launch_sum_splits(mul, sqrsum, token_mixes, token_rstd, streams.width, eps)
    return mixes if rstd is None else (mixes, rstd)
