"""hash_gate: a token's experts from a table by its id, their weights from its logits, in one launch.

    idx     = table[token_ids[t]]
    scores  = scoring_func(logits[t])[idx]                                    float32
    weights = scores / max(Σ scores, 1e-20) · routed_scaling_factor

token_ids int32 or int64 (num_tokens), table int32 (vocab_size, num_topk), logits bfloat16 or float32
(num_tokens, num_experts), idx int64 or int32 and weights float32 (num_tokens, num_topk). Entries that are not experts,
and all slots of a token whose id is not in the table or whose `mask` is False, become -1 with weight 0.

A warp takes a token, lane k its k-th slot: it loads one row of the table, then gathers the logits of those experts.
Only softmax reads all logits of a token, while the load of the table is in flight.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.gate.topk_gate import TopkGateConfig
from tk_moe.gate.topk_gate_with_weights import LOGIT_DTYPES, MAX_EXPERTS, MAX_TOPK, check_gate_options
from tk_moe.lib.scoring import (
    GateOptions,
    ScoringFunc,
    clamped,
    load_logits_macro,
    score,
    scoring_func_of,
    softmax_score,
    softmax_sums_macro,
)


# Every access has a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _hash_gate_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    token_ids_dtype: torch.dtype,
    options: GateOptions,
    alignment: int,
    config: TopkGateConfig,
    arch: Arch,
) -> Any:
    """`alignment` of the rows of logits is in bytes."""
    import tilelang.language as T

    vector = alignment // dtype.itemsize
    per_lane = align(ceil_div(num_experts, 32), vector)
    is_softmax = options.scoring_func is ScoringFunc.SOFTMAX
    warps = config.warps
    num_tokens = T.dynamic("num_tokens")
    vocab_size = T.dynamic("vocab_size")
    load_logits = load_logits_macro(num_experts, vector, dtype)
    softmax_sums = softmax_sums_macro(per_lane)

    @T.prim_func
    def hash_gate(
        token_ids: T.Tensor((num_tokens,), token_ids_dtype),
        table: T.Tensor((vocab_size, num_topk), "int32"),
        logits: T.Tensor((num_tokens, num_experts), dtype),
        mask: T.Tensor((num_tokens,), "bool"),
        factor: T.float32,
        topk_idx: T.Tensor((num_tokens, num_topk), options.idx_dtype),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * warps + thread // 32
            if token < num_tokens:  # uniform in a warp
                x = T.alloc_local((per_lane,), "float32")
                sums = T.alloc_local((2,), "float32")
                is_wanted = T.alloc_var("bool")
                token_id = T.alloc_var("int64")
                expert = T.alloc_var("int32")
                value = T.alloc_var("float32")
                token_id = T.cast(token_ids[token], "int64")
                is_wanted = True
                if options.has_mask:
                    is_wanted = mask[token]
                if is_softmax:
                    load_logits(logits, token, lane, x)
                expert = -1
                if is_wanted and lane < num_topk and token_id >= 0 and token_id < T.cast(vocab_size, "int64"):
                    expert = table[token_id, lane]
                if is_softmax:
                    softmax_sums(x, sums)
                value = T.float32(0)
                if expert >= 0 and expert < num_experts:
                    logit = T.cast(logits[token, expert], "float32")
                    value = softmax_score(logit, sums) if is_softmax else score(options.scoring_func, logit)
                else:
                    expert = -1
                if options.renormalize:
                    total = T.warp_reduce_sum(value)
                    value = T.if_then_else(expert < 0, T.float32(0), value / clamped(total))
                if lane < num_topk:
                    topk_idx[token, lane] = T.cast(expert, options.idx_dtype)
                    topk_weights[token, lane] = T.if_then_else(expert < 0, T.float32(0), value * factor)

    return hash_gate


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
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    arch = get_arch(logits.device)
    options = GateOptions(ScoringFunc(scoring_func), renormalize, mask is not None, False, topk_idx.dtype)
    sizes_and_dtypes = num_experts, topk_idx.shape[1], logits.dtype, token_ids.dtype
    config = TopkGateConfig.best(arch)
    gate = _hash_gate_kernel(*sizes_and_dtypes, options, check.row_alignment(logits), config, arch)
    gate(token_ids, table, logits, mask, routed_scaling_factor, topk_idx, topk_weights)


def _check_table(token_ids: Tensor, table: Tensor, num_experts: int) -> None:
    """With TK_DEBUG: raise if the table lacks a token's id or has an expert that does not exist."""
    low, high = (int(x) for x in token_ids.aminmax())
    check.require(low >= 0 and high < table.shape[0], "token_ids", f"0 to {table.shape[0] - 1}", (low, high))
    largest = int(table.max())
    check.require(largest < num_experts, "table", f"experts below {num_experts}", largest)


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

    topk_idx = table[token_ids]; a weight is scoring_func(logits)[expert] in float32, divided by max(Σ of the token's,
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
        mask: bool (num_tokens), contiguous: tokens to route; the others, padding, get indices -1 and weights 0.
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
    _hash_gate_out(
        *(token_ids, table, logits, mask, int(scoring_func), renormalize, float(routed_scaling_factor)),
        *(topk_idx, topk_weights),
    )
    return topk_idx, topk_weights
