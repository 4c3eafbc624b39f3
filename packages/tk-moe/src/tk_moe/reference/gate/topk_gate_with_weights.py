"""Reference of topk_gate_with_weights; differentiable with respect to the logits."""

import torch

from tk_moe.reference.gate.topk_gate import topk_gate
from tk_moe.reference.lib.scoring import as_floats, scores_of, weights_of
from tk_moe.scoring import ScoringFunc, scoring_func_of


def topk_gate_with_weights(
    logits: torch.Tensor,
    num_topk: int,
    scoring_func: ScoringFunc | str,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: torch.Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_topk` experts of the largest score + bias (softmax: logit + bias), and weights from their scores."""
    scoring_func = scoring_func_of(scoring_func)
    # Softmax has the order of the logits, which avoids ties that rounding the scores would make.
    ranks = as_floats(logits) if scoring_func is ScoringFunc.SOFTMAX else scores_of(logits, scoring_func)
    ranks = ranks.detach() if bias is None else ranks.detach() + bias
    topk_idx = topk_gate(ranks, num_topk)
    if mask is not None:
        topk_idx = torch.where(mask.unsqueeze(1), topk_idx, -1)
    return topk_idx.to(idx_dtype), weights_of(logits, topk_idx, scoring_func, renormalize, routed_scaling_factor)
