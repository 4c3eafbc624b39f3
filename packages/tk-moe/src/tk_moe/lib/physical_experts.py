"""Macros that map a chosen expert to its physical copy, and that to its index on a tensor-parallel rank."""

from typing import Any

import tilelang.language as T

# From one token to the next, the copy of an expert advances by this, modulo the number of copies.
_COPY_STEP = 23333


@T.macro
def of_copy(to_physical_map: T.Buffer, logical_count: T.Buffer, token: Any, ep_rank: Any, chosen: T.Buffer) -> None:
    """Replace the logical expert chosen[0] by the copy that this token uses; -1 for a negative map entry."""
    num_mapped, num_copies = to_physical_map.shape
    expert, count, copy = (T.alloc_var("int32") for _ in range(3))
    expert = T.min(chosen[0], num_mapped - 1)
    count = T.max(T.min(logical_count[expert], num_copies), 1)
    # (ep_rank + token * 23333) mod count, computed so that nothing exceeds 2**31.
    copy = T.truncmod(T.truncmod(token, count) * T.truncmod(_COPY_STEP, count), count)
    copy = T.truncmod(copy + T.truncmod(ep_rank, count), count)
    chosen[0] = T.max(to_physical_map[expert, copy], -1)


@T.macro
def of_tp_rank(per_rank: int, num_tp_ranks: int, tp_rank: Any, chosen: T.Buffer) -> None:
    """Replace the physical expert chosen[0] by its index among the experts of `tp_rank`, or by -1 if it is not one."""
    owner = T.alloc_var("int32")
    owner = T.truncdiv(chosen[0], per_rank)
    if T.truncmod(owner, num_tp_ranks) == tp_rank:
        chosen[0] = chosen[0] - (tp_rank + T.truncdiv(owner, num_tp_ranks) * (num_tp_ranks - 1)) * per_rank
    else:
        chosen[0] = -1
