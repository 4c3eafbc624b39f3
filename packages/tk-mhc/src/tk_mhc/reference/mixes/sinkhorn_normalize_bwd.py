"""Reference of sinkhorn_normalize_bwd."""

from torch import Tensor


def sinkhorn_normalize_bwd(d_o: Tensor, x: Tensor, repeat: int, eps: float) -> Tensor:
    """The backward of each step of sinkhorn_normalize, last to first, with the matrices and sums of the forward.

    y = x / (Σ x + eps) has d_x = (d_y - Σ d_y · y) / (Σ x + eps), the softmax y has d_x = y · (d_y - Σ d_y · y).
    """
    softmax = x.contiguous().softmax(-1)
    y = softmax + eps
    steps = []
    for dim in [-2] + [-1, -2] * (repeat - 1):
        total = y.sum(dim, keepdim=True) + eps
        y = y / total
        steps.append((dim, y, total))
    d_y = d_o.contiguous()
    for dim, y, total in reversed(steps):
        d_y = (d_y - (d_y * y).sum(dim, keepdim=True)) / total
    return softmax * (d_y - (d_y * softmax).sum(-1, keepdim=True))
