"""Reference of reduce_fused_bwd."""

import torch


def reduce_fused_bwd(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """grad_x (num_expanded_tokens, hidden), grad_topk_weights (num_tokens, num_topk) of `reduce_fused`.

    grad_x[pos] = topk_weights · grad[t], zero elsewhere; grad_topk_weights[t, k] = Σ grad[t] · x[pos], in float64.
    Pairs without a position inside x are skipped; rows with pos_to_expert < 0 stay zero.
    """
    num_topk = token_topk_to_pos.shape[1]
    num_expanded_tokens = pos_to_expert.shape[0]
    # Pairs without a position go to an extra row, which is cut off.
    grad_x = grad.new_zeros((num_expanded_tokens + 1, grad.shape[1]), dtype=grad.dtype if x is None else x.dtype)
    has_row = (token_topk_to_pos >= 0) & (token_topk_to_pos < num_expanded_tokens)
    pos = torch.where(has_row, token_topk_to_pos, num_expanded_tokens).long()
    for k in range(num_topk):
        scaled = grad.float() if topk_weights is None else topk_weights[:, k, None] * grad.float()
        grad_x[pos[:, k]] = scaled.to(grad_x.dtype)
    grad_x = torch.where(pos_to_expert[:, None] >= 0, grad_x[:num_expanded_tokens], 0)
    if topk_weights is None or x is None:
        return grad_x, None
    grad_topk_weights = torch.zeros_like(topk_weights)
    for k in range(num_topk if num_expanded_tokens else 0):
        row = x[pos[:, k].clamp(max=num_expanded_tokens - 1)]
        dot = (grad.double() * row.double()).sum(1).float()
        grad_topk_weights[:, k] = torch.where(has_row[:, k], dot, 0)
    return grad_x, grad_topk_weights
