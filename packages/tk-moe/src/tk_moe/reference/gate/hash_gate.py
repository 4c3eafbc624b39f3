"""Reference of hash_gate; differentiable with respect to the logits."""

import torch

from tk_moe.reference.lib.scoring import weights_of
from tk_moe.scoring import ScoringFunc, scoring_func_of


def hash_gate(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    logits: torch.Tensor,
    scoring_func: ScoringFunc | str,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: torch.Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts table[token_ids], and weights from their scores; -1 and 0 where there is no such expert."""
    scoring_func = scoring_func_of(scoring_func)
    is_known = (token_ids >= 0) & (token_ids < table.shape[0])
    if mask is not None:
        is_known = is_known & mask
    topk_idx = table[torch.where(is_known, token_ids, 0)].long()
    is_expert = is_known.unsqueeze(1) & (topk_idx >= 0) & (topk_idx < logits.shape[1])
    topk_idx = torch.where(is_expert, topk_idx, -1)
    return topk_idx.to(idx_dtype), weights_of(logits, topk_idx, scoring_func, renormalize, routed_scaling_factor)
