"""Reference of inplace_unique_group_indices."""

import torch


def inplace_unique_group_indices(group_indices: torch.Tensor, num_groups: int) -> None:
    """In each row of integers (num_tokens, num_topk), copies of a group after its first become -1."""
    num_topk = group_indices.shape[1]
    same = group_indices[:, :, None] == group_indices[:, None, :]
    earlier = torch.ones(num_topk, num_topk, dtype=torch.bool, device=group_indices.device).tril(-1)
    is_group = (group_indices >= 0) & (group_indices < num_groups)
    group_indices.masked_fill_((same & earlier).any(-1) & is_group, -1)
