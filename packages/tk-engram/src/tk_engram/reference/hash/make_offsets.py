"""make_offsets: the first row of each table when the tables of a layer are stored one after the other."""

import torch
from torch import Tensor


def make_offsets(vocab_sizes: Tensor) -> Tensor:
    """Exclusive prefix sums of the sizes of a layer's tables: int32 (L, N - 1, M) → int32 (L, (N - 1)·M)."""
    sizes = vocab_sizes.flatten(1)
    return (sizes.cumsum(1, dtype=torch.int64) - sizes).int()
