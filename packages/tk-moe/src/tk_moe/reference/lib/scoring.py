"""Scores of logits and the weights of chosen experts, in plain PyTorch; differentiable."""

import torch

from tk_moe.scoring import LEAST_SUM, ScoringFunc


def as_floats(logits: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype that scores are computed in: float32, or float64 if they are float64."""
    return logits if logits.dtype is torch.float64 else logits.to(torch.float32)


def scores_of(logits: torch.Tensor, scoring_func: ScoringFunc) -> torch.Tensor:
    """Scores of (num_tokens, num_experts) logits; float32 unless they are float64."""
    x = as_floats(logits)
    # A CPU's vectorized loop and the scalar one that ends it differ in the last bit: equal logits would not tie.
    wide = x.double() if x.is_cpu else x
    if scoring_func is ScoringFunc.SIGMOID:
        return torch.sigmoid(wide).to(x.dtype)
    if scoring_func is ScoringFunc.SQRTSOFTPLUS:
        softplus = torch.nn.functional.softplus(wide, beta=1.0, threshold=20.0).to(x.dtype)
        # The root has no derivative at 0, but the derivative of the score tends to 0.
        is_zero = softplus == 0
        return torch.where(is_zero, softplus, torch.where(is_zero, torch.ones_like(softplus), softplus).sqrt())
    if scoring_func is ScoringFunc.SOFTMAX:
        return torch.softmax(x, dim=-1)
    return x


def weights_of(
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring_func: ScoringFunc,
    renormalize: bool,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Weights (num_tokens, num_topk) of the chosen experts; 0 for an index outside 0 … num_experts-1."""
    is_expert = (topk_idx >= 0) & (topk_idx < logits.shape[1])
    safe_idx = torch.where(is_expert, topk_idx, 0).long()
    # Tokens without an expert, whose scores may be NaN, must not affect the result or its gradient.
    has_expert = is_expert.any(dim=1, keepdim=True)
    logits = torch.where(has_expert, logits, torch.zeros_like(logits))
    if scoring_func is ScoringFunc.SOFTMAX:
        scores = scores_of(logits, scoring_func).gather(1, safe_idx)
    else:
        chosen = logits.gather(1, safe_idx)
        scores = scores_of(torch.where(is_expert, chosen, torch.zeros_like(chosen)), scoring_func)
    weights = torch.where(is_expert, scores, torch.zeros_like(scores))
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=LEAST_SUM)
        # 0 / NaN is NaN: slots without an expert become 0 again.
        weights = torch.where(is_expert, weights, torch.zeros_like(weights))
    return weights * routed_scaling_factor
