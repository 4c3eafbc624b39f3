"""moe_topk_gate_backward: the gradient of the logits of moe_topk_gate_forward, from the scores that it saved.

With u = scores[t], e = topk_idx[t], w = topk_weights[t], g = grad_topk_weights[t] and a slot k of those with an expert,

    D        = Σ u[e[k]] + 1e-20
    du[e[k]] = (routed_scaling_factor · g[k] - Σ g·w) / D      routed_scaling_factor · g[k] without renormalization
    du      += (h - (Σ h·u) / Σ u) / Σ u                       with h = grad_scores_sum[the token's sequence]
    grad     = du · u'

where slots with the same expert add up, in order, and the slope u' of the scores is, by the scores alone,

    sqrtsoftplus   -expm1(-u²) / 2u, 0 where u is 0
    sigmoid        u · (1 - u)
    softmax        grad = u · (du - Σ du·u)

scores, grad_scores_sum and grad_logits float32 (num_tokens or sequences, num_experts), the others (num_tokens,
num_topk), topk_idx int64 or int32.

Each warp handles one token, lane k its k-th slot. The warp first writes the whole row as if no expert were chosen, then
each lane overwrites its expert's element. Without h only softmax reads the whole row of scores.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import given_or_new, launching, op
from tk_moe.gate.gate import IDX_DTYPES, MAX_EXPERTS, MAX_TOPK, WARPS
from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of


@dataclass(frozen=True)
class BackwardOptions:
    """Options that the kernel is compiled for."""

    scoring_func: ScoringFunc
    renormalize: bool
    has_mask: bool
    has_sums: bool
    """Whether there is grad_scores_sum."""
    idx_dtype: torch.dtype


# Written per thread: a match instruction finds lanes with equal experts, for which tiles have no operation. No tile
# version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _moe_topk_gate_backward_kernel(
    num_experts: int, num_topk: int, options: BackwardOptions, alignment: int, arch: Arch
) -> Any:
    """Rows of scores, grad_scores_sum and grad_logits are aligned to `alignment` bytes."""
    import tilelang.language as T

    from tk_core.headers import builtin
    from tk_moe.lib.expert_rows import Run, load_row, store_row
    from tk_moe.lib.slots import add_up

    vector = alignment // 4
    per_lane = ceil_div(num_experts, 32 * vector) * vector
    is_softmax, has_sums = options.scoring_func is ScoringFunc.SOFTMAX, options.has_sums
    num_tokens, num_seqs = T.dynamic("num_tokens"), T.dynamic("num_seqs")

    def times_slope(grad: Any, u: Any, inner: Any) -> Any:
        if is_softmax:
            return u * (grad - inner)
        if options.scoring_func is ScoringFunc.SIGMOID:
            return grad * (u * (T.float32(1) - u))
        half = builtin("float32", "expm1f", -(u * u)) * T.float32(-0.5)
        return T.if_then_else(u == T.float32(0), T.float32(0), grad * (half / u))

    @T.macro
    def sum_rows(h: T.Buffer, u: T.Buffer, sums: T.Buffer) -> None:
        # sums = (Σ u, Σ h·u) over the experts.
        for i in T.unroll(2):
            sums[i] = T.float32(0)
        for j in T.unroll(per_lane):
            sums[0] = sums[0] + u[j]
            sums[1] = sums[1] + h[j] * u[j]
        for i in T.unroll(2):
            sums[i] = T.warp_reduce_sum(sums[i])

    @T.prim_func
    def moe_topk_gate_backward(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        topk_idx: T.Tensor((num_tokens, num_topk), options.idx_dtype),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        grad_topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        grad_scores_sum: T.Tensor((num_seqs, num_experts), "float32"),
        grad_logits: T.Tensor((num_tokens, num_experts), "float32"),
        factor: T.float32,
        tokens_of_seq: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            run = Run(lane * vector, num_experts, vector)
            if token < num_tokens:  # uniform in a warp
                u, row = T.alloc_local((per_lane,), "float32"), T.alloc_local((per_lane,), "float32")
                sums, grad = T.alloc_local((2,), "float32"), T.alloc_local((1,), "float32")
                expert, is_counted = T.alloc_var("int32"), T.alloc_var("bool")
                value, dot, total, inner, inverse, mean = (T.alloc_var("float32") for _ in range(6))
                expert = -1
                value = T.float32(0)
                dot = T.float32(0)
                grad[0] = T.float32(0)
                if lane < num_topk:
                    index = topk_idx[token, lane]
                    if index >= 0 and index < num_experts:
                        expert = T.cast(index, "int32")
                        value = scores[token, expert]
                        grad[0] = grad_topk_weights[token, lane] * factor
                        if options.renormalize:
                            dot = grad_topk_weights[token, lane] * topk_weights[token, lane]
                if options.renormalize:
                    dot = T.warp_reduce_sum(dot)
                    total = T.warp_reduce_sum(value) + T.float32(LEAST_SUM)
                    grad[0] = T.if_then_else(expert < 0, T.float32(0), (grad[0] - dot) / total)
                # The gradient of the sums adds nothing to this: its Σ du·u is 0.
                inner = T.warp_reduce_sum(grad[0] * value) if is_softmax else T.float32(0)
                if is_softmax or has_sums:
                    load_row(scores, token, run, vector, 0.0, u)
                for j in T.unroll(per_lane):
                    row[j] = T.float32(0)
                if has_sums:
                    load_row(grad_scores_sum, token // tokens_of_seq, run, vector, 0.0, row)
                    sum_rows(row, u, sums)
                    is_counted = sums[0] != T.float32(0)
                    if options.has_mask:
                        is_counted = is_counted and mask[token]
                    inverse = T.if_then_else(is_counted, T.float32(1) / sums[0], T.float32(0))
                    mean = sums[1] * inverse
                    for j in T.unroll(per_lane):
                        row[j] = (row[j] - mean) * inverse
                if is_softmax or has_sums:
                    for j in T.unroll(per_lane):
                        row[j] = times_slope(row[j], u[j], inner)
                store_row(row, token, run, vector, grad_logits)
                add_up(grad, expert, num_topk, lane)
                # The stores of the whole row come before the stores that overwrite the slots' elements.
                T.sync_warp()
                if expert >= 0:
                    if has_sums:
                        grad[0] += (grad_scores_sum[token // tokens_of_seq, expert] - mean) * inverse
                    grad_logits[token, expert] = times_slope(grad[0], value, inner)

    return moe_topk_gate_backward


@op(writes=("out",), aligned=())
def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: ScoringFunc | str = "sqrtsoftplus",
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
    *,
    renormalize: bool = True,
) -> Tensor:
    """Gradient of the logits of `moe_topk_gate_forward`, from the scores that it saved.

    Names and formulas are those of DeepSeek's TileKernels 2.1.0, which has sqrtsoftplus only. With u = scores and, over
    the slots that have an expert, D = sum of u + 1e-20, the scores' gradient is

    - (routed_scaling_factor * g - sum of g * w) / D for the expert of a slot with the weight w and its gradient g;
      without renormalize routed_scaling_factor * g; slots with the same expert add up, in order, so that the bits are
      the same in every run;
    - plus, with grad_scores_sum h, (h - (sum of h * u) / (sum of u)) / (sum of u) for all experts: that is the gradient
      of an auxiliary loss of which h is the derivative by each sequence's sum of u / (sum of u). There is none where
      mask[t] is False or the sum of u is 0.

    It is multiplied by the slope of the scores, which is 0 where a sqrtsoftplus score is 0. A saved sigmoid has lost
    its slope where the score is near 1, 17 % of it for a logit of 15: `gate_weights_bwd` starts from the logits.
    Within rtol 1e-5 of float64, plus 1e-5 of the largest gradient, or of its largest term where the terms of all
    gradients cancel, as with one expert.

    Args:
        scores: float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous: logical experts, the forward's unmapped_topk_idx;
            num_topk from 1 to 32. An index outside 0 to num_experts - 1 is ignored with its gradient.
        topk_weights, grad_topk_weights: float32 (num_tokens, num_topk), contiguous: weights of the routed experts.
        routed_scaling_factor, scoring_func: As the forward had them.
        mask: bool (num_tokens), False for padding, which has no part in the auxiliary loss.
        grad_scores_sum: float32 (num_seqs, num_experts); each sequence has num_tokens / num_seqs tokens, one after
            another.
        out: Where to write the result.
        renormalize: As the forward had it; without it topk_weights is not read.

    Returns:
        float32 (num_tokens, num_experts); zeros for a token without an expert, but for the auxiliary loss.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride or device; a size out of range; identity scoring; num_tokens is not a multiple
            of num_seqs.
    """
    num_tokens, num_experts = check.tensor("scores", scores, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of scores)", num_experts, 1, MAX_EXPERTS)
    device = scores.device
    _, num_topk = check.tensor("topk_idx", topk_idx, IDX_DTYPES, (num_tokens, "num_topk"), device=device)
    check.in_range("num_topk (columns of topk_idx)", num_topk, 1, MAX_TOPK)
    for name, x in (("topk_weights", topk_weights), ("grad_topk_weights", grad_topk_weights)):
        check.tensor(name, x, (torch.float32,), (num_tokens, num_topk), device=device)
    check.number("routed_scaling_factor", routed_scaling_factor)
    scoring_func = scoring_func_of(scoring_func)
    is_known = scoring_func != ScoringFunc.IDENTITY
    check.require(is_known, "scoring_func", "sigmoid, sqrtsoftplus or softmax", str(scoring_func))
    if mask is not None:
        check.tensor("mask", mask, (torch.bool,), (num_tokens,), device=device)
    num_seqs = 1
    if grad_scores_sum is not None:
        shape = "num_seqs", num_experts
        num_seqs, _ = check.tensor("grad_scores_sum", grad_scores_sum, (torch.float32,), shape, device=device)
        check.require(num_seqs >= 1, "grad_scores_sum", "at least one sequence", num_seqs)
        are_even = num_tokens % num_seqs == 0
        check.require(are_even, "grad_scores_sum", "a number of sequences that divides {} tokens", num_seqs, num_tokens)
    check.flag("renormalize", renormalize)
    grad_logits = given_or_new("out", out, scores, (num_tokens, num_experts))
    if launching(grad_logits):
        present = (x is not None for x in (mask, grad_scores_sum))
        options = BackwardOptions(scoring_func, renormalize, *present, topk_idx.dtype)
        rows = (x for x in (scores, grad_logits, grad_scores_sum) if x is not None)
        alignment = min(map(check.row_alignment, rows))
        backward = _moe_topk_gate_backward_kernel(num_experts, num_topk, options, alignment, get_arch(device))
        backward(
            *(scores, topk_idx, topk_weights, grad_topk_weights, mask, grad_scores_sum, grad_logits),
            *(float(routed_scaling_factor), num_tokens // num_seqs),
        )
    return grad_logits
