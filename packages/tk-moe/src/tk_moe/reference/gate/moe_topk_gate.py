"""Reference of moe_topk_gate_forward."""

import torch
from torch import Tensor

from tk_moe.reference.gate.gate import as_floats, scores_of, topk_gate
from tk_moe.reference.gate.top2_sum_gate import physical_experts, without_other_groups
from tk_moe.reference.gate.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx
from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of

_LOW = 0xFFFFFFFF


def philox(offset: Tensor, subsequence: Tensor, keys: tuple[int, int]) -> list[Tensor]:
    """The four 32-bit words of Philox4x32-10, in int64, of the counter's 64-bit halves and a key's 32-bit halves."""
    words = [offset & _LOW, offset >> 32 & _LOW, subsequence & _LOW, subsequence >> 32 & _LOW]
    for _ in range(10):
        # Products wrap at 64 bits, as they should.
        product, other = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            *((other >> 32 & _LOW) ^ words[1] ^ keys[0], other & _LOW),
            *((product >> 32 & _LOW) ^ words[3] ^ keys[1], product & _LOW),
        ]
        keys = keys[0] + 0x9E3779B9 & _LOW, keys[1] + 0xBB67AE85 & _LOW
    return words


def random_experts(
    num_tokens: int, num_slots: int, num_choices: Tensor, ep_rank: int, random_offset: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Distinct experts below num_choices int64 (), and weights in (0, 1], both (num_tokens, num_slots)."""
    device = num_choices.device
    offset = torch.as_tensor(random_offset, dtype=torch.int64, device=device)
    slots = torch.arange(num_slots, device=device)
    subsequence = torch.arange(num_tokens, device=device)[:, None] * 32 + slots
    first, second, *_ = philox(offset.expand(subsequence.shape), subsequence, (ep_rank, 0))
    weights = first.to(torch.float32) * 2.0**-32 + 2.0**-33
    picks = second % (num_choices - slots)
    is_open = torch.ones_like(picks, dtype=torch.bool)
    for _ in range(num_slots):
        keys = torch.where(is_open, picks * 32 + slots, 2**62)
        least, winner = keys.min(dim=1, keepdim=True)
        is_open = is_open.scatter(1, winner, False)
        picks = picks + (is_open & (slots > winner) & (picks >= least // 32))
    return picks, weights


def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: ScoringFunc | str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    scores: Tensor | None = None,
    *,
    num_groups: int = 0,
    num_topk_groups: int = 0,
    num_topk_sum: int = 2,
    renormalize: bool = True,
    random_offset: int | Tensor = 0,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """topk_idx and topk_weights (num_tokens, num_topk + shared experts); see the op."""
    scoring_func = scoring_func_of(scoring_func)
    num_tokens, num_experts = logits.shape
    num_shared = num_shared_experts if use_shared_as_routed else 0
    everywhere = torch.ones(num_tokens, dtype=torch.bool, device=logits.device)
    is_routed = everywhere if mask is None else mask
    is_random = ~everywhere if force_random is None else force_random & is_routed
    is_scored = (is_routed & ~is_random)[:, None]

    # Logits of padding may be anything.
    x = torch.where(is_scored, as_floats(logits), 0.0)
    all_scores = scores_of(x, scoring_func)
    ranks = x if scoring_func is ScoringFunc.SOFTMAX else all_scores
    biased = ranks if bias is None else ranks + bias
    if image_bias is not None and image_token_mask is not None:
        biased = torch.where(image_token_mask[:, None], ranks + image_bias, biased)
    if num_groups != num_topk_groups:
        by_group = biased.view(num_tokens, num_groups, num_experts // num_groups)
        kept = topk_sum_and_topk_group_idx(by_group, num_topk_sum, num_topk_groups)
        biased = without_other_groups(biased, kept, num_groups)
    experts = topk_gate(biased, num_topk)
    unmapped = experts
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        unmapped = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, experts)
        experts = torch.where((unmapped >= 0) & (unmapped < num_experts), unmapped, -1)

    chosen = torch.where(experts >= 0, all_scores.gather(1, experts.clamp(min=0)), 0.0)
    weights = chosen / (chosen.sum(dim=1, keepdim=True) + LEAST_SUM) if renormalize else chosen
    # 0 / NaN is NaN: slots without an expert become 0 again.
    weights = torch.where(experts >= 0, weights * routed_scaling_factor, 0.0)
    shared = torch.arange(num_experts, num_experts + num_shared, device=logits.device).expand(num_tokens, num_shared)
    indices = physical_experts(
        torch.cat([experts, shared], dim=1), num_experts, ep_rank, 1, 0, 1, to_physical_map, logical_count
    )
    weights = torch.cat([weights, weights.new_ones(shared.shape)], dim=1)
    if force_random is not None:
        num_choices = torch.tensor(num_experts + num_shared, device=logits.device)
        if logical_count is not None and to_physical_map is not None:
            num_choices = logical_count.clamp(1, to_physical_map.shape[1]).sum()
        drawn = random_experts(num_tokens, num_topk + num_shared, num_choices, ep_rank, random_offset)
        indices, weights = (torch.where(is_random[:, None], *each) for each in zip(drawn, (indices, weights)))
    indices = torch.where(is_routed[:, None], indices, -1).to(idx_dtype)
    weights = torch.where(is_routed[:, None], weights, 0.0)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(is_scored, unmapped, -1))
    if scores is not None:
        scores.copy_(torch.where(is_scored, all_scores, 0.0))
    if out is not None:
        out[0].copy_(indices)
        out[1].copy_(weights)
        return out
    return indices, weights
