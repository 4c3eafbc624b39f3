"""Shared by the optimizer's steps on matrices (R, D) scaled by rows and columns: checks, and the tile of a block."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from tk_core import check
from tk_core.math import align, ceil_div

MAX_WIDTH = 16384
"""Columns of a matrix, at most: a row is held in the registers of one thread block."""
DTYPES = (torch.float32,)


@dataclass(frozen=True)
class RowTile:
    """Rows that a thread block holds at a time. Sums over columns are ordered by it, so by D alone.

    Some threads share a row, each with every `threads_per_row`-th vector of it, and have `rows_per_thread` such rows:

        row 0           [ thread 0 | thread 1 | … | thread G - 1 | thread 0 | … ]
        row 1           [ thread G | … ]
        …
        row threads/G   [ thread 0 | thread 1 | … ]
    """

    vector: int
    """Neighbouring columns of a thread."""
    threads_per_row: int
    """G, a power of two, as the sum over them wants."""
    rows_per_thread: int
    threads: int = 256

    @property
    def num_groups(self) -> int:
        """Groups of threads that have a row each."""
        return max(1, self.threads // self.threads_per_row)

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.num_groups * self.rows_per_thread

    def columns(self, width: int) -> int:
        """Columns of the tile; those beyond the width are zeros."""
        return align(width, self.threads_per_row * self.vector)

    @staticmethod
    def best(width: int) -> "RowTile":
        """16 columns a thread, 32 in the widest matrices, and two rows in flight where registers allow it. Untuned."""
        vector = gcd(width, 4)
        threads_per_row = min(512, max(4, 1 << (ceil_div(width, 16) - 1).bit_length()))
        return RowTile(vector, threads_per_row, 2 if width <= 8192 else 1, threads=max(256, threads_per_row))


def check_matrix(matrix: Any, row_scale: Any, col_scale: Any) -> tuple[int, int]:
    """Check a float32 matrix (R, D) and its scales (R,) and (D,); returns R and D. Raises TypeError or ValueError."""
    num_rows, width = check.tensor("matrix", matrix, DTYPES, ("R", "D"))
    check.in_range("D (columns of matrix)", width, 1, MAX_WIDTH)
    check.tensor("row_scale", row_scale, DTYPES, (num_rows,), device=matrix.device)
    check.tensor("col_scale", col_scale, DTYPES, (width,), device=matrix.device)
    return num_rows, width
