"""hash_gate: looks up a token's experts in a table by token id, and weighs them by the token's logits, in one launch.

    idx     = table[token_ids[t]]
    scores  = scoring_func(logits[t])[idx]                                    float32
    weights = scores / max(Σ scores, 1e-20) · routed_scaling_factor

token_ids int32 or int64 (num_tokens), table int32 (vocab_size, num_topk), logits bfloat16 or float32
(num_tokens, num_experts), idx int64 or int32 and weights float32 (num_tokens, num_topk). Entries that are not experts,
and all slots of a token whose id is not in the table or whose `mask` is False, become -1 with weight 0.

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
    "tk_moe::hash_gate_out",
    mutates=("topk_idx", "topk_weights"),
    reference="hash_gate",
    translate=lambda call: {"scoring_func": ScoringFunc(call.scoring_func), "idx_dtype": call.topk_idx.dtype},
)
def _hash_gate_out(
    token_ids: Tensor,
    table: Tensor,
    logits: Tensor,
    mask: Tensor | None,
    scoring_func: int,
    renormalize: bool,
    routed_scaling_factor: float,
    topk_idx: Tensor,
    topk_weights: Tensor,
) -> None:
    """Launch."""
    options = ScoringFunc(scoring_func), renormalize, routed_scaling_factor
    launch_gate(logits, None, mask, *options, (topk_idx, topk_weights), (token_ids, table))


def _check_table(token_ids: Tensor, table: Tensor, num_experts: int) -> None:
    """With TK_DEBUG: raise if the table lacks a token's id or has an expert that does not exist."""
    for extreme in token_ids.aminmax():
        check.in_range("token_ids", int(extreme), 0, table.shape[0] - 1)
    check.below("table", table, num_experts, "experts below {}")


@replayable
def hash_gate(
    token_ids: Tensor,
    table: Tensor,
    logits: Tensor,
    scoring_func: ScoringFunc | str,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Look up each token's experts by its id and weigh them by the scores of its logits.

    topk_idx = table[token_ids]; weights are scoring_func(logits)[topk_idx] in float32, divided by max(the token's sum,
    1e-20) if `renormalize`, times `routed_scaling_factor`. `gate_weights_bwd` is the backward of the weights.

    Args:
        token_ids: int32 or int64 (num_tokens), contiguous. An id without a row in the table gives -1 and 0 in all slots
            (`TK_DEBUG=1` raises ValueError).
        table: int32 (vocab_size, num_topk), contiguous; num_topk from 1 to 32. Negative entries, and those from
            num_experts on, mean no expert (`TK_DEBUG=1` raises ValueError for the latter).
        logits: bfloat16 or float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        scoring_func: Any ScoringFunc, or its name; softmax is over all experts.
        renormalize: Whether to divide by the sum of the token's scores.
        routed_scaling_factor: Factor of the weights, applied last.
        mask: bool (num_tokens), contiguous: False for padding tokens, which get indices -1 and weights 0.
        idx_dtype: torch.int64 or torch.int32.

    Returns:
        topk_idx: `idx_dtype` (num_tokens, num_topk), -1 where there is no expert.
        topk_weights: float32 (num_tokens, num_topk), 0 where there is no expert.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, stride or device, or a size out of range.
    """
    (num_tokens,) = check.tensor("token_ids", token_ids, (torch.int32, torch.int64), ("num_tokens",))
    device = token_ids.device
    vocab_size, num_topk = check.tensor("table", table, (torch.int32,), ("vocab_size", "num_topk"), device=device)
    check.require(vocab_size >= 1, "table", "at least one row", vocab_size)
    check.in_range("num_topk (columns of table)", num_topk, 1, MAX_TOPK)
    _, num_experts = check.tensor("logits", logits, LOGIT_DTYPES, (num_tokens, "num_experts"), device=device)
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    scoring_func = scoring_func_of(scoring_func)
    check_gate_options(renormalize, routed_scaling_factor, mask, idx_dtype, logits)
    if check.reads_data(token_ids) and token_ids.numel():
        _check_table(token_ids, table, num_experts)
    topk_idx = logits.new_empty((num_tokens, num_topk), dtype=idx_dtype)
    topk_weights = logits.new_empty((num_tokens, num_topk), dtype=torch.float32)
    options = int(scoring_func), renormalize, float(routed_scaling_factor)
    _hash_gate_out(token_ids, table, logits, mask, *options, topk_idx, topk_weights)
    return topk_idx, topk_weights
