"""Which rows, or which part of K, each group has."""

from collections.abc import Iterator
from itertools import accumulate

import torch

from tk_core.math import align

_ALIGNMENT = 128  # each group begins at a multiple of this, in rows or along K


def rows_of_groups(
    grouped_layout: torch.Tensor, num_rows: int, num_groups: int, use_psum_layout: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """`(group, its rows)` of the groups that have rows; rows are int64 indices."""
    if use_psum_layout:
        for group, (first, end) in enumerate(_psum_ranges(grouped_layout, num_rows)):
            if first < end:
                yield group, torch.arange(first, end, device=grouped_layout.device)
        return
    for group in range(num_groups):
        rows = (grouped_layout == group).nonzero().flatten()
        if rows.numel():
            yield group, rows


def _psum_ranges(psum: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """`(first, end)` of each group: from the aligned end of the group before to psum[group], both at most num_rows."""
    ends = psum.tolist()
    firsts = [0, *(align(end, _ALIGNMENT) for end in ends[:-1])]
    return [(min(first, num_rows), min(end, num_rows)) for first, end in zip(firsts, ends)]


def k_ranges(ks: list[int] | torch.Tensor, total: int) -> list[tuple[int, int]]:
    """`(first, end)` along K of each group, from sizes (a list) or ends (a tensor, aligned here), at most `total`."""
    if isinstance(ks, torch.Tensor):
        ends = [align(min(max(end, 0), total), _ALIGNMENT) for end in ks.tolist()]
    else:
        ends = list(accumulate(ks))
    return list(zip([0, *ends[:-1]], ends))
