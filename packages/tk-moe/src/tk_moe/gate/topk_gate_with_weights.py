"""topk_gate_with_weights: scores of a token's logits, its num_topk best experts and their weights, in one launch.

    scores  = scoring_func(logits[t])                                         float32
    idx     = argsort(scores + bias, descending, stable)[:num_topk]           softmax: of logits[t] + bias
    weights = scores[idx] / max(Σ scores[idx], 1e-20) · routed_scaling_factor

logits bfloat16 or float32 (num_tokens, num_experts), bias float32 (num_experts), idx int64 or int32 and weights float32
(num_tokens, num_topk). Tokens whose `mask` is False get -1 and 0.

A warp takes a token and chooses as in packed_selection.py, or where that does not apply as in selection.py. Then lane k
has the k-th best expert and computes its score again from the logit, and a warp reduction gives the denominator.
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
from tk_moe.lib.packed_selection import can_pack, choose_packed_macro, expert_of
from tk_moe.lib.scoring import (
    GateOptions,
    ScoringFunc,
    clamped,
    score,
    scoring_func_of,
    softmax_score,
    softmax_sums_macro,
    write_scores,
)
from tk_moe.lib.selection import NO_KEY, choose_macro, lane_vector, sort_key

MAX_EXPERTS = 1024
MAX_TOPK = 32
LOGIT_DTYPES = (torch.bfloat16, torch.float32)
IDX_DTYPES = (torch.int64, torch.int32)


# Every access has a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _topk_gate_with_weights_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    options: GateOptions,
    alignment: int,
    bias_alignment: int,
    config: TopkGateConfig,
    arch: Arch,
) -> Any:
    """`alignment` of the rows of logits and `bias_alignment` of bias are in bytes."""
    import tilelang.language as T

    scoring_func, has_bias = options.scoring_func, options.has_bias
    is_softmax = scoring_func is ScoringFunc.SOFTMAX
    # Not for softmax, whose sums take a lane's experts to be consecutive.
    is_packed = can_pack(num_experts, num_topk) and not is_softmax
    most = alignment // dtype.itemsize
    if is_packed:
        most = min(most, 4)  # a lane sorts four keys: neighbouring experts may all be good
    vector = lane_vector(num_experts, 32, most)
    per_lane = align(ceil_div(num_experts, 32), vector)
    # The logit where there is no expert: it adds nothing to a sum of exponentials, and is harmless elsewhere.
    none = float("-inf") if is_softmax else 0.0
    warps = config.warps
    num_tokens = T.dynamic("num_tokens")
    # Consecutive experts of a lane: its vectors are 32 vectors apart, or all neighbours.
    run_length = vector if is_packed else per_lane
    bias_vector = min(vector, bias_alignment // 4)
    choose = choose_macro(per_lane, num_topk)
    choose_packed = choose_packed_macro(num_experts, per_lane, vector, num_topk) if is_packed else None
    softmax_sums = softmax_sums_macro(per_lane)

    @T.macro
    def load(logits: T.Buffer, bias: T.Buffer, token: T.int32, lane: T.int32, x: T.Buffer, shift: T.Buffer) -> None:
        values = T.alloc_local((per_lane,), dtype)
        for c in T.unroll(per_lane // vector):
            if expert_of(c * vector, lane, run_length) < num_experts:
                for v in T.vectorized(vector):
                    values[c * vector + v] = logits[token, expert_of(c * vector, lane, run_length) + v]
        if has_bias:
            for c in T.unroll(per_lane // bias_vector):
                if expert_of(c * bias_vector, lane, run_length) < num_experts:
                    for v in T.vectorized(bias_vector):
                        shift[c * bias_vector + v] = bias[expert_of(c * bias_vector, lane, run_length) + v]
        for j in T.unroll(per_lane):
            x[j] = T.if_then_else(
                expert_of(j, lane, run_length) < num_experts, T.cast(values[j], "float32"), T.float32(none)
            )

    @T.prim_func
    def topk_gate_with_weights(
        logits: T.Tensor((num_tokens, num_experts), dtype),
        bias: T.Tensor((num_experts,), "float32"),
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
                shift = T.alloc_local((per_lane,), "float32")
                keys = T.alloc_local((per_lane,), "int32")
                chosen = T.alloc_local((1,), "int32")
                sums = T.alloc_local((2,), "float32")
                is_wanted = T.alloc_var("bool")
                value = T.alloc_var("float32")
                load(logits, bias, token, lane, x, shift)
                is_wanted = True
                if options.has_mask:
                    is_wanted = mask[token]
                chosen[0] = -1
                value = T.float32(0)
                if is_wanted:
                    if scoring_func in (ScoringFunc.SIGMOID, ScoringFunc.SQRTSOFTPLUS):
                        write_scores(scoring_func, x, x, per_lane)
                    if is_packed:
                        ranks = T.alloc_local((per_lane,), "float32")
                        for j in T.unroll(per_lane):
                            ranks[j] = x[j] + shift[j] if has_bias else x[j]
                        choose_packed(ranks, lane, chosen)
                    else:
                        for j in T.unroll(per_lane):
                            rank = x[j] + shift[j] if has_bias else x[j]
                            keys[j] = T.if_then_else(
                                expert_of(j, lane, run_length) < num_experts, sort_key(rank), T.int32(NO_KEY)
                            )
                        choose(keys, lane, expert_of(0, lane, run_length), chosen)
                    if is_softmax:
                        softmax_sums(x, sums)
                    if lane < num_topk:
                        logit = T.cast(logits[token, chosen[0]], "float32")
                        value = softmax_score(logit, sums) if is_softmax else score(scoring_func, logit)
                    if options.renormalize:
                        total = T.warp_reduce_sum(value)
                        value = value / clamped(total)
                if lane < num_topk:
                    topk_idx[token, lane] = T.cast(chosen[0], options.idx_dtype)
                    topk_weights[token, lane] = value * factor

    return topk_gate_with_weights


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
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    arch = get_arch(logits.device)
    options = GateOptions(ScoringFunc(scoring_func), renormalize, mask is not None, bias is not None, topk_idx.dtype)
    alignments = check.row_alignment(logits), 16 if bias is None else check.row_alignment(bias)
    config = TopkGateConfig.best(arch)
    args = (num_experts, topk_idx.shape[1], logits.dtype, options, *alignments, config, arch)
    gate = _topk_gate_with_weights_kernel(*args)
    gate(logits, bias, mask, routed_scaling_factor, topk_idx, topk_weights)


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
    equals the smaller index first. A weight is the expert's score without bias, divided by max(Σ of the chosen, 1e-20)
    if `renormalize`, times `routed_scaling_factor`. `gate_weights_bwd` is the backward of the weights.

    Args:
        logits: bfloat16 or float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        num_topk: Experts per token, from 1 to num_experts and at most 32.
        scoring_func: Any ScoringFunc, or its name.
        bias: float32 (num_experts), contiguous, or None for zeros. It does not enter the weights.
        renormalize: Whether to divide by the sum of the chosen scores.
        routed_scaling_factor: Factor of the weights, applied last.
        mask: bool (num_tokens), contiguous: tokens to route; the others, padding, get indices -1 and weights 0.
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
    _topk_gate_with_weights_out(
        *(logits, bias, mask, int(scoring_func), renormalize, float(routed_scaling_factor), topk_idx, topk_weights)
    )
    return topk_idx, topk_weights


def check_gate_options(renormalize: Any, routed_scaling_factor: Any, mask: Any, idx_dtype: Any, logits: Tensor) -> None:
    """Check the arguments that all gates with weights have."""
    check.flag("renormalize", renormalize)
    check.number("routed_scaling_factor", routed_scaling_factor)
    if mask is not None:
        check.tensor("mask", mask, (torch.bool,), (logits.shape[0],), device=logits.device)
    check.require_type(idx_dtype in IDX_DTYPES, "idx_dtype", "torch.int64 or torch.int32", idx_dtype)
