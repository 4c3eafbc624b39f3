"""Reference of expand_to_fused_bwd."""

import torch


def expand_to_fused_bwd(grad_rows: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows of grad_rows (num_expanded_tokens, hidden) in float32, slots ascending; round to its dtype.

    Positions outside grad_rows are skipped.
    """
    num_tokens, num_topk = token_topk_to_pos.shape
    num_expanded_tokens, hidden = grad_rows.shape
    acc = grad_rows.new_zeros((num_tokens, hidden), dtype=torch.float32)
    for k in range(num_topk if num_expanded_tokens else 0):
        pos = token_topk_to_pos[:, k].long()
        has_row = (pos >= 0) & (pos < num_expanded_tokens)
        acc = torch.where(has_row[:, None], acc + grad_rows[pos.where(has_row, 0)].float(), acc)
    return acc.to(grad_rows.dtype)
