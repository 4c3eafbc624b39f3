"""Reference of moe_topk_gate_backward, in float64."""

import torch
from torch import Tensor

from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of


def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: ScoringFunc | str = "sqrtsoftplus",
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
    *,
    renormalize: bool = True,
) -> Tensor:
    """Gradient (num_tokens, num_experts) of the logits, rounded to scores' dtype; see the op."""
    scoring_func = scoring_func_of(scoring_func)
    num_tokens, num_experts = scores.shape
    u = scores.double()
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    safe_idx = torch.where(is_expert, topk_idx, 0).long()
    grad = torch.where(is_expert, grad_topk_weights.double(), 0.0)
    grad_chosen = grad * routed_scaling_factor
    if renormalize:
        total = torch.where(is_expert, u.gather(1, safe_idx), 0.0).sum(dim=1, keepdim=True) + LEAST_SUM
        dot = (grad * torch.where(is_expert, topk_weights.double(), 0.0)).sum(dim=1, keepdim=True)
        grad_chosen = torch.where(is_expert, (grad_chosen - dot) / total, 0.0)
    grad_scores = torch.zeros_like(u).scatter_add(1, safe_idx, grad_chosen)
    # Of softmax, whose slope takes all scores, that of the auxiliary loss is 0.
    inner = (grad_scores * u).sum(dim=1, keepdim=True)
    if grad_scores_sum is not None:
        num_seqs = grad_scores_sum.shape[0]
        h = grad_scores_sum.double().repeat_interleave(num_tokens // num_seqs, dim=0)
        total = u.sum(dim=1, keepdim=True)
        is_counted = total != 0
        if mask is not None:
            is_counted = is_counted & mask[:, None]
        inverse = torch.where(is_counted, 1 / total, 0.0)
        grad_scores = grad_scores + (h - (h * u).sum(dim=1, keepdim=True) * inverse) * inverse
    if scoring_func is ScoringFunc.SOFTMAX:
        grad_logits = u * (grad_scores - inner)
    elif scoring_func is ScoringFunc.SIGMOID:
        grad_logits = grad_scores * u * (1 - u)
    else:
        grad_logits = torch.where(u == 0, 0.0, grad_scores * torch.expm1(-u.square()) / (-2 * u))
    if out is not None:
        return out.copy_(grad_logits)
    return grad_logits.to(scores.dtype)
