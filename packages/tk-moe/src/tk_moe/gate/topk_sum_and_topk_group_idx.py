"""topk_sum_and_topk_group_idx: the best groups of experts of each token, by their best one or two scores.

    sum[t, g] = sum of the num_topk_sum largest of scores[t, g]               (one float32 addition)
    out[t]    = argsort(sum[t], descending, stable)[:num_topk_groups]

scores float32 (num_tokens, num_groups, num_experts_per_group), out int64 (num_tokens, num_topk_groups).

Each warp handles one token. Each group has the same number of lanes, a power of two, which agree on its best scores by
shuffles. Then the lanes of a group count the groups ahead of it, and its first lane stores the group in that place.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_moe.gate.gate import MAX_EXPERTS, WARPS

MAX_GROUPS = 32


# Written per thread: shuffles rank the groups, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _topk_sum_kernel(
    num_groups: int, group_size: int, num_topk_sum: int, num_topk_groups: int, alignment: int, arch: Arch
) -> Any:
    """The scores of each group are aligned to `alignment` bytes."""
    import tilelang.language as T

    from tk_moe.lib import selection

    lanes = selection.group_lanes(num_groups)
    vector = selection.lane_vector(group_size, lanes, alignment // 4)
    per_lane = align(ceil_div(group_size, lanes), vector)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def topk_sum_and_topk_group_idx(
        scores: T.Tensor((num_tokens, num_groups, group_size), "float32"),
        out: T.Tensor((num_tokens, num_topk_groups), "int64"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            group = lane // lanes
            first = lane % lanes * per_lane
            if token < num_tokens:  # uniform in a warp
                values = T.alloc_local((per_lane,), "float32")
                keys = T.alloc_local((per_lane,), "int32")
                best = T.alloc_local((3,), "int32")
                key, position = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
                if group < num_groups:
                    for c in T.unroll(per_lane // vector):
                        if first + c * vector < group_size:
                            for v in T.vectorized(vector):
                                values[c * vector + v] = scores[token, group, first + c * vector + v]
                for j in T.unroll(per_lane):
                    is_expert = first + j < group_size
                    keys[j] = T.if_then_else(is_expert, selection.sort_key(values[j]), T.int32(selection.NO_KEY))
                selection.best_three(keys, best)
                selection.group_key(best, lanes, num_topk_sum, key)
                selection.group_position(key, num_groups, lane, position)
                if group < num_groups and lane % lanes == 0 and position[0] < num_topk_groups:
                    out[token, position[0]] = T.cast(group, "int64")

    return topk_sum_and_topk_group_idx


@op(aligned=())
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """Choose the `num_topk_groups` groups with the largest sum of their best one or two scores, best first.

    The order is that of a stable descending sort: NaN above +∞, -0 equal to +0, among equals the smaller index first.
    Name and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        scores: float32 (num_tokens, num_groups, num_experts_per_group), contiguous; 1 to 32 groups, at most 1024
            experts in all.
        num_topk_sum: Number of a group's scores to add, 1 or 2, and at most num_experts_per_group.
        num_topk_groups: Groups per token, from 1 to num_groups.

    Returns:
        int64 (num_tokens, num_topk_groups): distinct indices of groups.

    Raises:
        TypeError: scores is not a float32 tensor, or a number is not an int.
        ValueError: scores has another shape or is not contiguous, or a size is out of range.
    """
    shape = "num_tokens", "num_groups", "num_experts_per_group"
    num_tokens, num_groups, group_size = check.tensor("scores", scores, (torch.float32,), shape)
    check.in_range("num_groups (dimension 1 of scores)", num_groups, 1, MAX_GROUPS)
    check.in_range("num_experts_per_group (dimension 2 of scores)", group_size, 1, MAX_EXPERTS // num_groups)
    check.in_range("num_topk_sum", num_topk_sum, 1, min(2, group_size))
    check.in_range("num_topk_groups", num_topk_groups, 1, num_groups)
    out = new(scores.new_empty, (num_tokens, num_topk_groups), dtype=torch.int64)
    if launching(out):
        sizes = num_groups, group_size, num_topk_sum, num_topk_groups
        _topk_sum_kernel(*sizes, check.row_alignment(scores), get_arch(scores.device))(scores, out)
    return out
