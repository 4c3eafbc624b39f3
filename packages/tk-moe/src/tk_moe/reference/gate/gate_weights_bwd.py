"""Reference of gate_weights_bwd: the derivative of the weights written out."""

import torch

from tk_moe.reference.gate.gate import as_floats, scores_of
from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of


def gate_weights_bwd(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring_func: ScoringFunc | str,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> torch.Tensor:
    """Gradient (num_tokens, num_experts) of the logits; indices outside 0 … num_experts-1 are ignored."""
    scoring_func = scoring_func_of(scoring_func)
    is_expert = (topk_idx >= 0) & (topk_idx < logits.shape[1])
    has_expert = is_expert.any(dim=1, keepdim=True)
    safe_idx = torch.where(is_expert, topk_idx, 0).long()
    x = torch.where(has_expert, as_floats(logits), 0.0)
    if scoring_func is ScoringFunc.SOFTMAX:
        probabilities = scores_of(x, scoring_func)
        scores = probabilities.gather(1, safe_idx)
    else:
        x = torch.where(is_expert, x.gather(1, safe_idx), 0.0)
        scores = scores_of(x, scoring_func)
    scores = torch.where(is_expert, scores, 0.0)

    grad_scores = torch.where(is_expert, grad_weights.to(x.dtype) * routed_scaling_factor, 0.0)
    is_clamped = torch.ones_like(has_expert)
    if renormalize:
        total = scores.sum(dim=1, keepdim=True)
        denominator = total.clamp(min=LEAST_SUM)
        is_clamped = total < LEAST_SUM
        # The gradient minus its weighted mean, with weights that add up to 1, without cancellation.
        differences = (grad_scores.unsqueeze(2) - grad_scores.unsqueeze(1)) * (scores / denominator).unsqueeze(1)
        grad_scores = torch.where(is_clamped, grad_scores, differences.sum(dim=2)) / denominator
    grad_scores = torch.where(is_expert, grad_scores, 0.0)

    grad = torch.zeros_like(logits, dtype=x.dtype)
    if scoring_func is ScoringFunc.SOFTMAX:
        grad.scatter_add_(1, safe_idx, grad_scores)
        # If the weights add up to 1, experts that were not chosen get no gradient.
        inner = torch.where(is_clamped, (grad_scores * scores).sum(dim=1, keepdim=True), 0.0)
        grad = torch.where(has_expert, probabilities * (grad - inner), 0.0)
    else:
        grad.scatter_add_(1, safe_idx, torch.where(is_expert, grad_scores * _slopes(x, scores, scoring_func), 0.0))
    return grad.to(logits.dtype)


def _slopes(x: torch.Tensor, scores: torch.Tensor, scoring_func: ScoringFunc) -> torch.Tensor:
    """Derivatives of the scores with respect to the logits x."""
    if scoring_func is ScoringFunc.SIGMOID:
        return (1 - scores) * scores
    if scoring_func is ScoringFunc.SQRTSOFTPLUS:
        e = x.exp()
        return torch.where(scores == 0, 0.0, torch.where(x > 20, 1.0, e / (e + 1)) / (scores + scores))
    return torch.ones_like(x)
