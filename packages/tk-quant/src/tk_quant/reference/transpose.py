"""References of transpose and batched_transpose."""

import torch


def transpose(x: torch.Tensor) -> torch.Tensor:
    """out[n, m] = x[m, n], contiguous."""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """out[b, n, m] = x[b, m, n], contiguous."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
