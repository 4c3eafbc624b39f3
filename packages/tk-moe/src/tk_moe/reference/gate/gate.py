"""References of topk_gate, topk_gate_with_weights and hash_gate; the weights are differentiable by the logits."""

import torch

from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of


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


def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """First `num_topk` columns of a stable descending argsort of each row of scores (num_tokens, num_experts)."""
    # Radix sorts distinguish NaNs by their bits, and -0 from +0; so make them equal first.
    scores = torch.where(scores.isnan(), torch.full_like(scores, torch.nan), scores)
    scores = torch.where(scores == 0, torch.zeros_like(scores), scores)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :num_topk].clone(memory_format=torch.contiguous_format)


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
