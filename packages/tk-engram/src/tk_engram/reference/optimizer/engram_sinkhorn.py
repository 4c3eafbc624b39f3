"""References of the Sinkhorn iterations."""

from torch import Tensor

from tk_engram.sizes import NUM_PARTIALS


def engram_sinkhorn_step(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x = (r · M) · c, norm = √Σ_d x², q = 1 / (norm + eps), r ← r · q: (norm, Σ (x · q)² of 396 ranges of rows)."""
    num_rows, width = matrix.shape
    x = row_scale[:, None] * matrix * col_scale
    norm = x.square().sum(1).sqrt()
    q = 1 / (norm + eps)
    row_scale.mul_(q)
    range_rows = -(-num_rows // NUM_PARTIALS)
    squares = x.new_zeros((NUM_PARTIALS * range_rows, width))
    squares[:num_rows] = (x * q[:, None]).square()
    return norm, squares.view(NUM_PARTIALS, range_rows, width).sum(1)


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """col_sumsq[d] = Σ_p col_sumsq_partial[p, d]: from 0, p ascending, one addition each."""
    col_sumsq.zero_()
    for partial in col_sumsq_partial:
        col_sumsq.add_(partial)


def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """out = x · (alpha / (√Σ_d x² + eps)) with x = (r · M) · c."""
    x = row_scale[:, None] * matrix * col_scale
    norm = x.square().sum(1, keepdim=True).sqrt()
    result = x * (alpha / (norm + eps))
    return result if out is None else out.copy_(result)
