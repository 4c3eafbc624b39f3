"""Reference of aux_fi."""

import torch

from tk_moe.reference.balance.group_count import group_count


def aux_fi(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """float32(count · num_experts) / float32(num_tokens · num_aux_topk) of each expert; zeros without tokens."""
    counts = group_count(topk_idx, num_experts)
    if topk_idx.shape[0] == 0:
        return counts.float()
    # A tensor: on a GPU, torch replaces division by a Python number with multiplication by its reciprocal.
    total = counts.new_tensor(topk_idx.shape[0] * num_aux_topk, dtype=torch.int64)
    return (counts.long() * num_experts).float() / total.float()
