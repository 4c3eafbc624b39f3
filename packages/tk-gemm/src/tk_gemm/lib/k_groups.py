"""Groups that are ranges of K: their checks, where they end, and the results where K is 0."""

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_gemm.lib.groups import INT32
from tk_gemm.lib.operands import BLOCK


def check_ks(ks: Any, grouped_layout: Any, total: int, device: torch.device) -> int:
    """Check the groups along K, sizes in a list or ends in an int32 (G) tensor; return their number.

    With TK_DEBUG=1 also the values of tensors: no group ends before it begins, and grouped_layout has the list's sizes.
    """
    if isinstance(ks, Tensor):
        (num_groups,) = check.tensor("ks", ks, INT32, ("G",), device=device)
        check.require(num_groups > 0, "ks", "at least one group", num_groups)
        check.require(grouped_layout is None, "grouped_layout", "None where ks is a tensor", "a tensor")
        check.ends("ks", ks, BLOCK)
        return num_groups
    check.require_type(isinstance(ks, (list, tuple)), "ks", "a list of int or a tensor", type(ks).__name__)
    check.require(len(ks) > 0, "ks", "at least one group", ks)
    for group, size in enumerate(ks):
        check.in_range(f"ks[{group}]", size, 0, 2**31 - 1)
        check.multiple_of(f"ks[{group}]", size, BLOCK)
    check.require(sum(ks) == total, "ks", "sizes that add up to {}, the operands' K", sum(ks), total)
    if grouped_layout is not None:
        check.tensor("grouped_layout", grouped_layout, INT32, (len(ks),), device=device)
        if check.reads_data(grouped_layout):
            found = grouped_layout.tolist()
            check.require(found == list(ks), "grouped_layout", "the sizes of ks, {}", found, list(ks))
    return len(ks)


# Sums that CUDA graphs read: they must outlive the cache, as a graph keeps only their addresses.
_in_graphs: dict[int, Tensor] = {}


def ends_of(ks: list[int] | Tensor, device: torch.device) -> Tensor:
    """Where each group ends, on the device: ks, or if that has the sizes, their running sums, copied there once."""
    if isinstance(ks, Tensor):
        return ks
    sums = _sums(tuple(ks), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[sums.data_ptr()] = sums
    return sums


@lru_cache(maxsize=1024)
def _sums(ks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(ks)), dtype=torch.int32, device=device)


def finish_without_k(c: Tensor | None, d: Tensor) -> None:
    """d = c, or zero without c: all groups are empty, and TMA takes no operand without elements."""
    if c is None:
        d.zero_()
    elif c is not d:
        d.copy_(c)
