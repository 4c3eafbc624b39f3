"""Reference of sinkhorn_normalize."""

from torch import Tensor


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Softmax of rows, plus eps; then columns and rows in turn divided by their sums plus eps, 2 · repeat - 1 times."""
    x = x.contiguous().softmax(-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x
