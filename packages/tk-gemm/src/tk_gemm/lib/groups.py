"""Checks of the arguments that assign rows to groups: grouped_layout and masked_m."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_gemm.lib.alignment import ALIGNMENT

INT32 = (torch.int32,)


def check_grouped_layout(
    layout: Any, num_rows: int, num_groups: int, use_psum_layout: bool, device: torch.device
) -> None:
    """Check the groups of rows: int32 (M), each row's group; or int32 (G), where each group's rows end.

    With TK_DEBUG=1 also the values: ids ascend and are below G, groups begin at multiples of the alignment and have -1
    only after their rows; no group ends before it begins.
    """
    check.flag("use_psum_layout", use_psum_layout)
    size = num_groups if use_psum_layout else num_rows
    check.tensor("grouped_layout", layout, INT32, (size,), device=device)
    if use_psum_layout:
        check.ends("grouped_layout", layout, ALIGNMENT)
    elif size and check.reads_data(layout):
        _check_ids(layout.cpu().long(), num_groups)


def _check_ids(ids: Tensor, num_groups: int) -> None:
    check.require(int(ids.max()) < num_groups, "grouped_layout", "groups below {}", int(ids.max()), num_groups)
    rows = (ids >= 0).nonzero().flatten()
    groups = ids[rows]
    for index in (groups[1:] < groups[:-1]).nonzero().flatten().tolist():
        got = f"group {groups[index + 1]} in row {rows[index + 1]}, after group {groups[index]}"
        raise ValueError(f"grouped_layout: expected groups in ascending order, got {got}")
    is_first = torch.cat([groups.new_ones(1, dtype=torch.bool), groups[1:] != groups[:-1]])[: len(groups)]
    for row in rows[is_first & (rows % ALIGNMENT != 0)].tolist():
        raise ValueError(
            f"grouped_layout: expected groups that begin at multiples of {ALIGNMENT}, got one that begins at row {row}"
        )
    for row in rows[:-1][(rows[1:] - rows[:-1] != 1) & ~is_first[1:]].tolist():
        raise ValueError(
            f"grouped_layout: expected -1 only after a group's last row, got -1 in row {row + 1}, within a group"
        )


def check_masked_m(masked_m: Any, expected_m: Any, num_groups: int, device: torch.device) -> None:
    """Check the number of rows of each group, int32 (G), and the number that the caller expects."""
    check.tensor("masked_m", masked_m, INT32, (num_groups,), device=device)
    check.in_range("expected_m", expected_m, 0, 2**31 - 1)
    if check.reads_data(masked_m):
        least = int(masked_m.min())
        check.require(least >= 0, "masked_m", "counts from 0", least)
