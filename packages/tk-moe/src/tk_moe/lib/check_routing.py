"""What the gates with groups, given routing and physical experts check."""

from torch import Tensor

from tk_core import check
from tk_moe.scoring import ScoringFunc

MAX_GROUPS = 32
MAX_SLOTS = 32


def check_groups(
    num_experts: int,
    num_topk: int,
    num_shared: int,
    groups: tuple[int, int],
    num_topk_sum: int,
    scoring_func: ScoringFunc,
) -> None:
    """Check sizes and the scoring function; `groups` are those kept and all, both 0 for none."""
    num_topk_groups, num_groups = groups
    is_known = scoring_func != ScoringFunc.IDENTITY
    check.require(is_known, "scoring_func", "sigmoid, sqrtsoftplus or softmax", str(scoring_func))
    check.in_range("num_topk", num_topk, 1, min(num_experts, MAX_SLOTS - num_shared))
    check.in_range("num_groups", num_groups, 0, num_experts)
    check.in_range("num_topk_groups", num_topk_groups, 0, num_groups)
    check.in_range("num_topk_sum", num_topk_sum, 1, 2)
    if num_groups:
        check.in_range("num_topk_groups", num_topk_groups, 1, num_groups)
        check.require(num_experts % num_groups == 0, "num_groups", "a divisor of {} experts", num_groups, num_experts)
    if num_groups != num_topk_groups:
        group_size = num_experts // num_groups
        check.in_range("num_groups (with fewer kept)", num_groups, 1, MAX_GROUPS)
        enough = group_size >= num_topk_sum
        check.require(enough, "num_groups", "groups of at least {} experts", num_groups, num_topk_sum)
        check.in_range("num_topk (experts in the groups kept)", num_topk, 1, num_topk_groups * group_size)


def check_values(
    num_experts: int,
    fix_routing_mask: Tensor | None,
    unmapped_topk_idx: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
) -> None:
    """With TK_DEBUG: raise for a given index or a count out of range."""
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        given = unmapped_topk_idx[fix_routing_mask]
        check.below("unmapped_topk_idx", given, num_experts, "experts below {}")
    if to_physical_map is not None and logical_count is not None:
        for extreme in logical_count.aminmax():
            check.in_range("logical_count", int(extreme), 1, to_physical_map.shape[1])
