"""Reference of get_fused_mapping."""

from typing import Any

import torch


def get_fused_mapping(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: bool = False,
) -> tuple[Any, ...]:
    """A stable counting sort of the flat (token, slot) pairs by expert, each expert's segment padded to `alignment`.

    Returns (pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end,
    num_tokens_per_expert, num_tokens_per_expert_list), and with `with_psum` expert_psum, expert_start plus the counts.
    """
    outs = full_length(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync, with_psum)
    maps, sizes, psum = outs[:6], outs[6], outs[7:]
    sizes_list: list[int] = []
    if num_expanded_tokens == 0 and not force_no_sync and not topk_idx.is_meta:
        sizes_list = sizes.tolist()
        maps = (*(each[: sum(sizes_list)] for each in maps[:3]), *maps[3:])
    return *maps, sizes, sizes_list, *psum


def full_length(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool,
    with_psum: bool,
) -> tuple[torch.Tensor, ...]:
    """The tensors of `get_fused_mapping`, the pos_to_* not cut to the sizes of the segments."""
    num_tokens, num_topk = topk_idx.shape
    num_pairs = num_tokens * num_topk
    flat = topk_idx.reshape(-1).long()
    # Pairs without an expert count as one more expert, which comes last.
    expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    order = torch.argsort(expert, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(num_pairs, device=flat.device) - (counts.cumsum(0) - counts)[expert[order]]

    sizes = (counts[:num_experts] + alignment - 1) // alignment * alignment
    end = sizes.cumsum(0)
    start = end - sizes
    num_pos = num_expanded_tokens
    if num_pos == 0:
        num_pos = (num_pairs + (alignment - 1) * num_experts) // alignment * alignment
    # An extra position after the last one takes all pairs that have none.
    pos = torch.where(expert < num_experts, start[expert.clamp(max=num_experts - 1)] + rank, num_pos).clamp(max=num_pos)
    pair = torch.arange(num_pairs, device=flat.device)

    def by_pos(values: torch.Tensor) -> torch.Tensor:
        out = torch.full((num_pos + 1,), -1, dtype=torch.int32, device=flat.device)
        out[pos] = values.int()
        return out[:num_pos].clone()

    maps = [by_pos(expert), by_pos(pair // num_topk), by_pos(pair)]
    token_topk_to_pos = torch.where(pos < num_pos, pos, -1).int().view(num_tokens, num_topk)
    psum = ((start + counts[:num_experts]).int(),) if with_psum else ()
    return (*maps, token_topk_to_pos, start.int(), end.int(), sizes.int(), *psum)
