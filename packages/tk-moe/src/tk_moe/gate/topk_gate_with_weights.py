"""topk_gate_with_weights: scores of a token's logits, its num_topk best experts and their weights, in one launch.

    scores  = scoring_func(logits[t])                                         float32
    idx     = argsort(scores + bias, descending, stable)[:num_topk]           softmax: of logits[t] + bias
    weights = scores[idx] / max(Σ scores[idx], 1e-20) · routed_scaling_factor

logits bfloat16 or float32 (num_tokens, num_experts), bias float32 (num_experts), idx int64 or int32 and weights float32
(num_tokens, num_topk). Tokens whose `mask` is False get -1 and 0.

The kernel is in gate_kernel.py.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.lib.gate_kernel import LOGIT_DTYPES, MAX_EXPERTS, MAX_TOPK, check_gate_options, launch_gate
from tk_moe.scoring import ScoringFunc, scoring_func_of


@op(
    "tk_moe::topk_gate_with_weights_out",
    mutates=("topk_idx", "topk_weights"),
    reference="topk_gate_with_weights",
    translate=lambda call: {
        "num_topk": call.topk_idx.shape[1],
        "scoring_func": ScoringFunc(call.scoring_func),
        "idx_dtype": call.topk_idx.dtype,
    },
)
def _topk_gate_with_weights_out(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scoring_func: int,
    renormalize: bool,
    routed_scaling_factor: float,
    topk_idx: Tensor,
    topk_weights: Tensor,
) -> None:
    """Launch."""
    options = ScoringFunc(scoring_func), renormalize, routed_scaling_factor
    launch_gate(logits, bias, mask, *options, (topk_idx, topk_weights))


@replayable
def topk_gate_with_weights(
    logits: Tensor,
    num_topk: int,
    scoring_func: ScoringFunc | str,
    bias: Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose the `num_topk` best experts for each token and weigh them by their scores.

    With scores = scoring_func(logits), computed in float32 (NaN and infinity included), experts are ranked by
    scores + bias; by logits + bias for softmax. The order is that of `topk_gate`: best first, NaN above +∞, among
    equals the smaller index first. A weight is the expert's score without bias, divided by max(sum of the chosen
    scores, 1e-20) if `renormalize`, times `routed_scaling_factor`. `gate_weights_bwd` is the backward of the weights.

    Args:
        logits: bfloat16 or float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        num_topk: Experts per token, from 1 to num_experts and at most 32.
        scoring_func: Any ScoringFunc, or its name.
        bias: float32 (num_experts), contiguous, or None for zeros. It does not enter the weights.
        renormalize: Whether to divide by the sum of the chosen scores.
        routed_scaling_factor: Factor of the weights, applied last.
        mask: bool (num_tokens), contiguous: False for padding tokens, which get indices -1 and weights 0.
        idx_dtype: torch.int64 or torch.int32.

    Returns:
        topk_idx: `idx_dtype` (num_tokens, num_topk), distinct in each row that is not masked.
        topk_weights: float32 (num_tokens, num_topk).

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, stride or device, or a size out of range.
    """
    num_tokens, num_experts = check.tensor("logits", logits, LOGIT_DTYPES, ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_topk", num_topk, 1, min(num_experts, MAX_TOPK))
    if bias is not None:
        check.tensor("bias", bias, (torch.float32,), (num_experts,), device=logits.device)
    scoring_func = scoring_func_of(scoring_func)
    check_gate_options(renormalize, routed_scaling_factor, mask, idx_dtype, logits)
    topk_idx = logits.new_empty((num_tokens, num_topk), dtype=idx_dtype)
    topk_weights = logits.new_empty((num_tokens, num_topk), dtype=torch.float32)
    options = int(scoring_func), renormalize, float(routed_scaling_factor)
    _topk_gate_with_weights_out(logits, bias, mask, *options, topk_idx, topk_weights)
    return topk_idx, topk_weights
