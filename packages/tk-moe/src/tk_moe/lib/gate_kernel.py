"""The kernel of topk_gate, topk_gate_with_weights and hash_gate: it chooses or looks up experts and weighs them.

Each warp handles one token. It chooses experts by packed keys (packed_selection.py) or, where these do not apply, full
keys (selection.py); in hash_gate, lane k < num_topk looks up the k-th expert in a table. Then lane k computes the score
of the k-th expert again from its logit, and a warp reduction gives the denominator. hash_gate reads all logits for
softmax only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_moe.scoring import ScoringFunc

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


# Written per thread: lanes rank keys by shuffles, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def gate_kernel(
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
            table = T.arg("table", T.Tensor((vocab_size, num_topk), "int32"))

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


def launch_gate(
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
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    arch = get_arch(logits.device)
    topk_idx, topk_weights = outputs
    num_topk = topk_idx.shape[1]
    present = (x is not None for x in (mask, bias, topk_weights))
    token_ids_dtype = lookup[0].dtype if lookup else None
    options = GateOptions(scoring_func, renormalize, *present, topk_idx.dtype, token_ids_dtype)
    alignments = check.row_alignment(logits), 16 if bias is None else check.row_alignment(bias)
    gate = gate_kernel(num_experts, num_topk, logits.dtype, options, *alignments, arch)
    gate(logits, bias, mask, factor, topk_idx, topk_weights, *lookup)


def check_gate_options(renormalize: Any, routed_scaling_factor: Any, mask: Any, idx_dtype: Any, logits: Tensor) -> None:
    """Check the arguments that `topk_gate_with_weights` and `hash_gate` share."""
    check.flag("renormalize", renormalize)
    check.number("routed_scaling_factor", routed_scaling_factor)
    if mask is not None:
        check.tensor("mask", mask, (torch.bool,), (logits.shape[0],), device=logits.device)
    check.require_type(idx_dtype in IDX_DTYPES, "idx_dtype", "torch.int64 or torch.int32", idx_dtype)
