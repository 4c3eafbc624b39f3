"""Reference of expand_to_fused_bwd."""

import torch

from tk_moe.reference.reduce.reduce_fused import reduce_fused


def expand_to_fused_bwd(grad_rows: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows of grad_rows (num_expanded_tokens, hidden) in float32, slots ascending; round to its dtype.

    Positions outside grad_rows are skipped.
    """
    return reduce_fused(grad_rows, None, token_topk_to_pos)
