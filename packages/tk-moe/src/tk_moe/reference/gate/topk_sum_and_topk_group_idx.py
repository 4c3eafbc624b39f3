"""Reference of topk_sum_and_topk_group_idx."""

import torch

from tk_moe.reference.gate.gate import topk_gate


def topk_sum_and_topk_group_idx(scores: torch.Tensor, num_topk_sum: int, num_topk_groups: int) -> torch.Tensor:
    """The `num_topk_groups` groups with the largest sums of their best one or two scores, best first.

    scores (num_tokens, num_groups, num_experts_per_group); of equal sums the smaller index comes first.
    """
    num_tokens, num_groups, num_experts_per_group = scores.shape
    rows = scores.reshape(num_tokens * num_groups, num_experts_per_group)
    best = rows.gather(1, topk_gate(rows, num_topk_sum))
    sums = best[:, 0] if num_topk_sum == 1 else best[:, 0] + best[:, 1]
    return topk_gate(sums.view(num_tokens, num_groups), num_topk_groups)
