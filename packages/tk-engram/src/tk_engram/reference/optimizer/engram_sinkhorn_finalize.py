"""Reference of engram_sinkhorn_finalize."""

from torch import Tensor


def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """out = x · (alpha / (√Σ_d x² + eps)) with x = (r · M) · c."""
    x = row_scale[:, None] * matrix * col_scale
    norm = x.square().sum(1, keepdim=True).sqrt()
    result = x * (alpha / (norm + eps))
    return result if out is None else out.copy_(result)
