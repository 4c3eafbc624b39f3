"""References of group_count and aux_fi."""

import torch


def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """How often each of 0 … num_groups - 1 occurs in group_idx int64 or int32 (num_tokens, num_topk), as int32."""
    flat = group_idx.reshape(-1).long()
    # Indices of no group are counted as one more group, which is cut off.
    flat = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:num_groups].clone()


def aux_fi(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """float32(count · num_experts) / float32(num_tokens · num_aux_topk) of each expert; zeros without tokens."""
    counts = group_count(topk_idx, num_experts)
    if topk_idx.shape[0] == 0:
        return counts.float()
    # A tensor: on a GPU, torch replaces division by a Python number with multiplication by its reciprocal.
    total = counts.new_tensor(topk_idx.shape[0] * num_aux_topk, dtype=torch.int64)
    return (counts.long() * num_experts).float() / total.float()
