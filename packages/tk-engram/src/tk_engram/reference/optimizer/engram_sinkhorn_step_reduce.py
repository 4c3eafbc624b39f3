"""Reference of engram_sinkhorn_step_reduce."""

from torch import Tensor


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """col_sumsq[d] = Σ_p col_sumsq_partial[p, d]: from 0, p ascending, one addition each."""
    col_sumsq.zero_()
    for partial in col_sumsq_partial:
        col_sumsq.add_(partial)
