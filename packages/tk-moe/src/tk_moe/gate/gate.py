"""topk_gate, topk_gate_with_weights and hash_gate: experts of each token, chosen or looked up, and their weights.

    scores  = scoring_func(logits[t])                                         float32
    idx     = argsort(scores + bias, descending, stable)[:num_topk]           softmax: of logits[t] + bias
              or table[token_ids[t]]                                          hash_gate
    weights = scores[idx] / max(Σ scores[idx], 1e-20) · routed_scaling_factor

logits bfloat16 or float32 (num_tokens, num_experts), bias float32 (num_experts), token_ids int32 or int64 (num_tokens),
table int32 or int64 (vocab_size, num_topk), idx int64 or int32 and weights float32 (num_tokens, num_topk). topk_gate
takes the scores themselves, and returns idx alone. Tokens whose `mask` is False get -1 and 0, as do entries of the
table that are not experts, and all slots of a token whose id is not in the table.

Each warp handles one token. It chooses experts by packed keys (lib/packed_selection.py) or, where these do not apply,
full keys (lib/selection.py); in hash_gate, lane k < num_topk looks up the k-th expert in a table. Then lane k computes
the score of the k-th expert again from its logit, and a warp reduction gives the denominator. hash_gate reads all
logits for softmax only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_moe.scoring import ScoringFunc, scoring_func_of

MAX_EXPERTS = 1024
MAX_TOPK = 32
LOGIT_DTYPES = (torch.bfloat16, torch.float32)
IDX_DTYPES = (torch.int64, torch.int32)

WARPS = 4
"""Warps of a gate's thread block, one token each. With 4, each warp has a scheduler of its own; 8 and 16 are up to 5 %
slower on an H200, for few tokens and for many."""
_WARPS_OF_SHORT_SELECTION = 6
"""For `topk_gate` with packed keys. Blocks of 6 warps do not divide an SM's warp slots evenly, so that the last blocks
go to the SMs that finish first, which is 2 % faster."""
_WARPS_OF_LOOKUP = 8
"""For `hash_gate`, which waits more than it computes: 3 % faster than 4 at 8192 tokens (H100), no slower at 128."""


@dataclass(frozen=True)
class GateOptions:
    """Options of a gate that its kernel is compiled for."""

    scoring_func: ScoringFunc
    renormalize: bool
    has_mask: bool
    has_bias: bool
    has_weights: bool
    idx_dtype: torch.dtype
    """Dtype of topk_idx."""
    token_ids_dtype: torch.dtype | None
    """Dtype of the ids by which experts are looked up; None where experts are chosen."""
    table_dtype: torch.dtype | None = None
    """Dtype of the table in which they are looked up."""


# Written per thread: lanes rank keys by shuffles, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _gate_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    options: GateOptions,
    alignment: int,
    bias_alignment: int,
    arch: Arch,
) -> Any:
    """Rows of logits are aligned to `alignment` bytes, bias to `bias_alignment` bytes."""
    import tilelang.language as T

    from tk_moe.lib.packed_selection import choose_packed
    from tk_moe.lib.scores import clamped, load_logits, score, softmax_score, softmax_sums, write_scores
    from tk_moe.lib.selection import NO_KEY, choose, expert_of, lane_vector, sort_key

    scoring_func, has_bias = options.scoring_func, options.has_bias
    is_softmax, looks_up = scoring_func is ScoringFunc.SOFTMAX, options.token_ids_dtype is not None
    # Where the expert fits into a packed key, and lanes rarely win more rounds than they have sorted keys. Not for
    # softmax: the fixed order of its sums requires the experts of a lane to be consecutive.
    is_packed = num_experts <= 256 and num_topk <= 16 and not is_softmax and not looks_up
    warps = (
        _WARPS_OF_LOOKUP if looks_up else WARPS if options.has_weights or not is_packed else _WARPS_OF_SHORT_SELECTION
    )
    most = alignment // dtype.itemsize
    if is_packed:
        most = min(most, 4)  # a lane sorts only four keys, and neighbours may all be good
    vector = most if looks_up else lane_vector(num_experts, 32, most)
    per_lane = align(ceil_div(num_experts, 32), vector)
    # Length of a lane's runs of consecutive experts: one vector, the next one being 32 vectors on, or all its experts.
    run_length = vector if is_packed or looks_up else per_lane
    bias_vector = min(vector, bias_alignment // 4)
    num_tokens, vocab_size = T.dynamic("num_tokens"), T.dynamic("vocab_size")

    @T.macro
    def select(x: T.Buffer, bias: T.Buffer, lane: T.int32, chosen: T.Buffer) -> None:
        shift, ranks = T.alloc_local((per_lane,), "float32"), T.alloc_local((per_lane,), "float32")
        keys = T.alloc_local((per_lane,), "int32")
        if has_bias:
            for c in T.unroll(per_lane // bias_vector):
                if expert_of(c * bias_vector, lane, run_length) < num_experts:
                    for v in T.vectorized(bias_vector):
                        shift[c * bias_vector + v] = bias[expert_of(c * bias_vector, lane, run_length) + v]
        write_scores(scoring_func, x, ranks)
        if has_bias:
            for j in T.unroll(per_lane):
                ranks[j] += shift[j]
        if is_packed:
            choose_packed(ranks, num_experts, vector, num_topk, lane, chosen)
        else:
            for j in T.unroll(per_lane):
                is_expert = expert_of(j, lane, run_length) < num_experts
                keys[j] = T.if_then_else(is_expert, sort_key(ranks[j]), T.int32(NO_KEY))
            choose(keys, num_topk, lane, expert_of(0, lane, run_length), chosen)

    @T.prim_func
    def gate(
        logits: T.Tensor((num_tokens, num_experts), dtype),
        bias: T.Tensor((num_experts,), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        factor: T.float32,
        topk_idx: T.Tensor((num_tokens, num_topk), options.idx_dtype),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        if looks_up:
            token_ids = T.arg("token_ids", T.Tensor((num_tokens,), options.token_ids_dtype))
            table = T.arg("table", T.Tensor((vocab_size, num_topk), options.table_dtype))

        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * warps + thread // 32
            if token < num_tokens:  # uniform in a warp
                x = T.alloc_local((per_lane,), "float32")
                chosen = T.alloc_local((1,), "int32")
                sums = T.alloc_local((2,), "float32")
                is_wanted, value = T.alloc_var("bool"), T.alloc_var("float32")
                if is_softmax or not looks_up:
                    load_logits(logits, num_experts, vector, run_length, token, lane, x)
                is_wanted = True
                if options.has_mask:
                    is_wanted = mask[token]
                chosen[0] = -1
                value = T.float32(0)
                if is_wanted:
                    if looks_up:
                        row = T.alloc_var("int64")
                        row = T.cast(token_ids[token], "int64")
                        if lane < num_topk and row >= 0 and row < T.cast(vocab_size, "int64"):
                            if options.table_dtype is torch.int64:
                                # Cut to 32 bits, a wide entry would be another expert.
                                chosen[0] = T.cast(T.max(T.min(table[row, lane], T.int64(num_experts)), -1), "int32")
                            else:
                                chosen[0] = table[row, lane]
                        if chosen[0] >= num_experts or chosen[0] < 0:
                            chosen[0] = -1
                    else:
                        select(x, bias, lane, chosen)
                    if options.has_weights:
                        if is_softmax:
                            softmax_sums(x, sums)
                        if lane < num_topk and (not looks_up or chosen[0] >= 0):
                            logit = T.cast(logits[token, chosen[0]], "float32")
                            value = softmax_score(logit, sums) if is_softmax else score(scoring_func, logit)
                        if options.renormalize:
                            total = T.warp_reduce_sum(value)
                            value = value / clamped(total)
                if lane < num_topk:
                    topk_idx[token, lane] = T.cast(chosen[0], options.idx_dtype)
                    if options.has_weights:
                        topk_weights[token, lane] = T.if_then_else(chosen[0] < 0, T.float32(0), value * factor)

    return gate


def _launch_gate(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scoring_func: ScoringFunc,
    renormalize: bool,
    factor: float,
    outputs: tuple[Tensor, Tensor | None],
    lookup: tuple[()] | tuple[Tensor, Tensor] = (),
) -> None:
    """Write `outputs`: topk_idx and topk_weights (or None). `lookup` is (token_ids, table) to look experts up."""
    num_experts = logits.shape[1]
    topk_idx, topk_weights = outputs
    num_topk = topk_idx.shape[1]
    present = (x is not None for x in (mask, bias, topk_weights))
    lookup_dtypes = (x.dtype for x in lookup)
    options = GateOptions(scoring_func, renormalize, *present, topk_idx.dtype, *(lookup_dtypes if lookup else (None,)))
    alignments = check.row_alignment(logits), 16 if bias is None else check.row_alignment(bias)
    gate = _gate_kernel(num_experts, num_topk, logits.dtype, options, *alignments, get_arch(logits.device))
    gate(logits, bias, mask, factor, topk_idx, topk_weights, *lookup)


def _check_options(renormalize: Any, routed_scaling_factor: Any, mask: Any, idx_dtype: Any, logits: Tensor) -> None:
    """Check the arguments that `topk_gate_with_weights` and `hash_gate` share."""
    check.flag("renormalize", renormalize)
    check.number("routed_scaling_factor", routed_scaling_factor)
    if mask is not None:
        check.tensor("mask", mask, (torch.bool,), (logits.shape[0],), device=logits.device)
    check.require_type(idx_dtype in IDX_DTYPES, "idx_dtype", "torch.int64 or torch.int32", idx_dtype)


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
        _launch_gate(scores, None, None, ScoringFunc.IDENTITY, False, 1.0, (out, None))
    return out


@op(aligned=())
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
    _check_options(renormalize, routed_scaling_factor, mask, idx_dtype, logits)
    topk_idx = new(logits.new_empty, (num_tokens, num_topk), dtype=idx_dtype)
    topk_weights = new(logits.new_empty, (num_tokens, num_topk), dtype=torch.float32)
    if launching(topk_idx, topk_weights):
        options = scoring_func, renormalize, float(routed_scaling_factor)
        _launch_gate(logits, bias, mask, *options, (topk_idx, topk_weights))
    return topk_idx, topk_weights


def _check_table(token_ids: Tensor, table: Tensor, num_experts: int) -> None:
    """With TK_DEBUG: raise if the table lacks a token's id or has an expert that does not exist."""
    for extreme in token_ids.aminmax():
        check.in_range("token_ids", int(extreme), 0, table.shape[0] - 1)
    check.below("table", table, num_experts, "experts below {}")


@op(aligned=())
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
        table: int32 or int64 (vocab_size, num_topk), contiguous; num_topk from 1 to 32. Negative entries, and those
            from num_experts on, mean no expert (`TK_DEBUG=1` raises ValueError for the latter).
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
    shape = "vocab_size", "num_topk"
    vocab_size, num_topk = check.tensor("table", table, (torch.int32, torch.int64), shape, device=device)
    check.require(vocab_size >= 1, "table", "at least one row", vocab_size)
    check.in_range("num_topk (columns of table)", num_topk, 1, MAX_TOPK)
    _, num_experts = check.tensor("logits", logits, LOGIT_DTYPES, (num_tokens, "num_experts"), device=device)
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    scoring_func = scoring_func_of(scoring_func)
    _check_options(renormalize, routed_scaling_factor, mask, idx_dtype, logits)
    if check.reads_data(token_ids) and token_ids.numel():
        _check_table(token_ids, table, num_experts)
    topk_idx = new(logits.new_empty, (num_tokens, num_topk), dtype=idx_dtype)
    topk_weights = new(logits.new_empty, (num_tokens, num_topk), dtype=torch.float32)
    if launching(topk_idx, topk_weights):
        options = scoring_func, renormalize, float(routed_scaling_factor)
        _launch_gate(logits, None, mask, *options, (topk_idx, topk_weights), (token_ids, table))
    return topk_idx, topk_weights
