"""Checks of the arguments that assign rows to groups: grouped_layout and masked_m."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import align
from tk_gemm.lib.alignment import get_mk_alignment_for_contiguous_layout
from tk_gemm.lib.operands import is_debugging

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
    if not size or not is_debugging(layout):
        return
    alignment = get_mk_alignment_for_contiguous_layout()
    if use_psum_layout:
        _check_psum(layout, alignment)
    else:
        _check_ids(layout.cpu().long(), num_groups, alignment)


def _check_psum(psum: Tensor, alignment: int) -> None:
    first = 0
    for group, end in enumerate(psum.tolist()):
        check.require(end >= first, f"grouped_layout[{group}]", "at least {}, where the group begins", end, first)
        first = align(end, alignment)


def _check_ids(ids: Tensor, num_groups: int, alignment: int) -> None:
    check.require(int(ids.max()) < num_groups, "grouped_layout", "groups below {}", int(ids.max()), num_groups)
    rows = (ids >= 0).nonzero().flatten()
    groups = ids[rows]
    check.require(bool((groups[1:] >= groups[:-1]).all()), "grouped_layout", "ascending groups", "others")
    if not rows.numel():
        return
    is_first = torch.cat([groups.new_ones(1, dtype=torch.bool), groups[1:] != groups[:-1]])
    off = rows[is_first & (rows % alignment != 0)]
    got = f"one that begins at row {int(off[0])}" if off.numel() else ""
    check.require(not off.numel(), "grouped_layout", "groups that begin at multiples of {}", got, alignment)
    gaps = (rows[1:] - rows[:-1] != 1) & ~is_first[1:]
    check.require(not bool(gaps.any()), "grouped_layout", "-1 only where a group ends", "-1 within a group")


def check_masked_m(masked_m: Any, expected_m: Any, num_groups: int, device: torch.device) -> None:
    """Check the number of rows of each group, int32 (G), and the number that the caller expects."""
    check.tensor("masked_m", masked_m, INT32, (num_groups,), device=device)
    check.in_range("expected_m", expected_m, 0, 2**31 - 1)
    if is_debugging(masked_m):
        least = int(masked_m.min())
        check.require(least >= 0, "masked_m", "counts from 0", least)
