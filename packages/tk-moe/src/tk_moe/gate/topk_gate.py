"""topk_gate: the num_topk best experts of each token, in the order of a stable descending sort of its scores.

    out[t] = argsort(scores[t], descending, stable)[:num_topk]

scores float32 (num_tokens, num_experts), out int64 (num_tokens, num_topk).

The kernel is in gate_kernel.py.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.call import launching, new, op
from tk_moe.lib.gate_kernel import MAX_EXPERTS, MAX_TOPK, launch_gate
from tk_moe.scoring import ScoringFunc


@op(aligned=())
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """Choose the `num_topk` experts with the highest scores for each token, best first.

    The order is that of a stable descending sort: NaN above +∞, -0 equal to +0, among equals the smaller index first.

    Args:
        scores: float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        num_topk: Experts per token, from 1 to num_experts and at most 32.

    Returns:
        int64 (num_tokens, num_topk): distinct indices of experts.

    Raises:
        TypeError: scores is not a float32 tensor, or num_topk is not an int.
        ValueError: scores has another shape or is not contiguous, or a size is out of range.
    """
    num_tokens, num_experts = check.tensor("scores", scores, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of scores)", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_topk", num_topk, 1, min(num_experts, MAX_TOPK))
    out = new(scores.new_empty, (num_tokens, num_topk), dtype=torch.int64)
    if launching(out):
        launch_gate(scores, None, None, ScoringFunc.IDENTITY, False, 1.0, (out, None))
    return out
