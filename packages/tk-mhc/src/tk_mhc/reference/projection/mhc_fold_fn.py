"""Reference of mhc_fold_fn."""

from torch import Tensor


def mhc_fold_fn(fn: Tensor, mhc_mult: int, norm_weight: Tensor | None = None) -> Tensor:
    """Σ_s (fn · norm_weight)[:, s·H : (s+1)·H] from stream 0 upwards, each product and sum rounded.

    fn (M3, mhc_mult · H), norm_weight (mhc_mult · H) or None for ones; returns (M3, H).
    """
    weighted = fn if norm_weight is None else fn * norm_weight
    folded, *streams = weighted.chunk(mhc_mult, dim=1)
    for stream in streams:
        folded = folded + stream
    return folded
