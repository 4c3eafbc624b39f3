"""Reference of top2_sum_gate."""

import torch

from tk_moe.reference.gate.gate import scores_of, topk_gate, weights_of
from tk_moe.reference.gate.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx
from tk_moe.reference.mapping.mask_indices_by_tp import mask_indices_by_tp
from tk_moe.scoring import ScoringFunc, scoring_func_of


def biased_ranks(logits: torch.Tensor, bias: torch.Tensor, scoring_func: ScoringFunc) -> torch.Tensor:
    """The ranks of the experts: scores + bias, or logits + bias for softmax."""
    return (logits if scoring_func == ScoringFunc.SOFTMAX else scores_of(logits, scoring_func)) + bias


def without_other_groups(ranks: torch.Tensor, kept: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Ranks (num_tokens, num_experts), those outside the groups `kept` (num_tokens, any) lowered to -∞."""
    by_group = ranks.view(ranks.shape[0], num_groups, ranks.shape[1] // num_groups)
    is_kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranks.device).scatter(1, kept, True)
    return torch.where(is_kept[:, :, None], by_group, torch.full_like(by_group, -torch.inf)).view_as(ranks)


def physical_experts(
    selection: torch.Tensor,
    num_experts: int,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
) -> torch.Tensor:
    """Map logical experts (num_tokens, any) to each token's physical copies, then to indices on the TP rank."""
    index, num_physical = selection, num_experts
    if to_physical_map is not None and logical_count is not None:
        token = torch.arange(selection.shape[0], dtype=torch.int64, device=selection.device)
        logical = selection.clamp(min=0)
        count = logical_count.clamp(1, to_physical_map.shape[1])[logical].long()
        copy = (ep_rank + token[:, None] * 23333) % count
        index = torch.where(selection >= 0, to_physical_map[logical, copy].long(), selection)
        num_physical += to_physical_map.shape[1] - 1
    return mask_indices_by_tp(index, num_physical, num_ep_ranks, tp_rank, num_tp_ranks)


def top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: ScoringFunc | str,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    *,
    renormalize: bool = True,
    num_topk_sum: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices int64 and weights float32, both (num_tokens, num_topk + shared experts); see the op."""
    scoring_func = scoring_func_of(scoring_func)
    num_tokens, num_experts = logits.shape
    ranks = biased_ranks(logits, bias, scoring_func)
    if num_groups != num_topk_groups:
        by_group = ranks.view(num_tokens, num_groups, num_experts // num_groups)
        ranks = without_other_groups(
            ranks, topk_sum_and_topk_group_idx(by_group, num_topk_sum, num_topk_groups), num_groups
        )
    selection = topk_gate(ranks, num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        selection = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, selection)
    weights = weights_of(logits, selection.clamp(min=0), scoring_func, renormalize, routed_scaling_factor)
    if unmapped_topk_idx is not None:
        none = torch.full_like(selection, -1)
        unmapped_topk_idx.copy_(selection if mask is None else torch.where(mask[:, None], selection, none))
    num_shared = num_shared_experts if use_shared_as_routed else 0
    shared = torch.arange(num_experts, num_experts + num_shared, dtype=torch.int64, device=logits.device)
    selection = torch.cat([selection, shared.expand(num_tokens, num_shared)], dim=1)
    weights = torch.cat([weights, weights.new_ones((num_tokens, num_shared))], dim=1)
    indices = physical_experts(
        selection, num_experts, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks, to_physical_map, logical_count
    )
    if mask is not None:
        indices = torch.where(mask[:, None], indices, torch.full_like(indices, -1))
        weights = torch.where(mask[:, None], weights, torch.zeros_like(weights))
    return indices, weights
