"""Shared by the lookup and its gradient: checks of indices, and how rows are cut into pieces."""

import torch
from torch import Tensor

from tk_core import check


def check_indices(indices: Tensor, num_rows: int, device: torch.device | None = None) -> tuple[int, int]:
    """Check int32 (T, C) indices of a table's rows; returns T and C.

    With TK_DEBUG an index of num_rows or more is a ValueError, which costs a synchronization.
    """
    num_tokens, num_columns = check.tensor("indices", indices, (torch.int32,), ("T", "C"), device=device)
    check.below("indices", indices, num_rows, "indices below {}, the rows of the table")
    return num_tokens, num_columns


def piece_channels(dim: int, max_channels: int) -> int:
    """The most channels, a multiple of 32 up to max_channels, that divide rows of `dim` evenly."""
    return max(n for n in range(32, max_channels + 1, 32) if dim % n == 0)
