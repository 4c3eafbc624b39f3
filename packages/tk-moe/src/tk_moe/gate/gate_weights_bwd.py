"""gate_weights_bwd: the gradient of a gate's logits from the gradient of its weights, in one launch.

The weights of a token are w = s / D · factor, with s = scoring_func(logits)[idx] and D = max(Σ s, 1e-20), or 1 without
renormalization. With x = logits and g = grad_weights · factor,

    grad_s[k] = g[k] / D                                where D is constant: 1, or 1e-20
              = Σ over j of (g[k] - g[j]) · s[j]/D / D  else; equal to (g[k] - Σ g·s/D) / D, without its cancellation
    grad_x[e] = Σ grad_s[k] · s'(x[e])                  over the slots k with idx[k] = e; 0 if e is not chosen
    grad_x[e] = p[e] · (Σ grad_s[k] - Σ grad_s·s)       softmax; the second Σ, over all slots, is 0 unless D is constant

grad_weights float32 and idx int64 or int32 (num_tokens, num_topk), logits and grad_logits bfloat16 or float32
(num_tokens, num_experts), float32 in between. Indices outside 0 … num_experts-1 are ignored.

Each warp handles one token, lane k its k-th slot. The warp first writes the whole row as if no expert were chosen:
zeros, or for softmax -p times the second Σ. Then each lane overwrites its expert's element. Slots with the same expert
are added in order before.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_moe.gate.gate import IDX_DTYPES, LOGIT_DTYPES, MAX_EXPERTS, MAX_TOPK, WARPS, GateOptions
from tk_moe.scoring import LEAST_SUM, ScoringFunc, scoring_func_of


# Written per thread: a match instruction finds lanes with equal experts, for which tiles have no operation. No tile
# version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _gate_weights_bwd_kernel(
    num_experts: int, num_topk: int, dtype: torch.dtype, options: GateOptions, alignment: int, arch: Arch
) -> Any:
    """Rows of logits and grad_logits are aligned to `alignment` bytes."""
    import tilelang.language as T

    from tk_moe.lib.scores import clamped, load_logits, score, slope, softmax_score, softmax_sums
    from tk_moe.lib.slots import add_up

    vector = alignment // dtype.itemsize
    chunks = ceil_div(num_experts, 32 * vector)
    per_lane = chunks * vector
    scoring_func = options.scoring_func
    is_softmax = scoring_func is ScoringFunc.SOFTMAX
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def subtract_mean(grad: T.Buffer, weight: T.float32) -> None:
        # grad = Σ over the slots j of (grad - grad[j]) · weight[j]; the weights add up to 1.
        difference, total = T.alloc_var("float32"), T.alloc_var("float32")
        total = T.float32(0)
        for k in T.unroll(num_topk):
            difference = grad[0] - T.shfl_sync(grad[0], k)
            total = total + difference * T.shfl_sync(weight, k)
        grad[0] = total

    @T.prim_func
    def gate_weights_bwd(
        grad_weights: T.Tensor((num_tokens, num_topk), "float32"),
        logits: T.Tensor((num_tokens, num_experts), dtype),
        topk_idx: T.Tensor((num_tokens, num_topk), options.idx_dtype),
        factor: T.float32,
        grad_logits: T.Tensor((num_tokens, num_experts), dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            if token < num_tokens:  # uniform in a warp
                x = T.alloc_local((per_lane,), "float32")
                row = T.alloc_local((per_lane,), dtype)
                sums = T.alloc_local((2,), "float32")
                grad = T.alloc_local((1,), "float32")
                expert = T.alloc_var("int32")
                logit, value, inner = (T.alloc_var("float32") for _ in range(3))
                if is_softmax:
                    load_logits(logits, num_experts, vector, vector, token, lane, x)
                expert = -1
                grad[0] = T.float32(0)
                if lane < num_topk:
                    index = topk_idx[token, lane]
                    grad[0] = grad_weights[token, lane] * factor
                    if index >= 0 and index < num_experts:
                        expert = T.cast(index, "int32")
                    else:
                        grad[0] = T.float32(0)
                logit = T.float32(0)
                value = T.float32(0)
                if is_softmax:
                    softmax_sums(x, sums)
                if expert >= 0:
                    logit = T.cast(logits[token, expert], "float32")
                    value = softmax_score(logit, sums) if is_softmax else score(scoring_func, logit)
                if options.renormalize:
                    total = T.warp_reduce_sum(value)
                    denominator = clamped(total)
                    if total >= T.float32(LEAST_SUM):
                        subtract_mean(grad, value / denominator)
                    grad[0] = T.if_then_else(expert < 0, T.float32(0), grad[0] / denominator)
                if is_softmax:
                    inner = T.float32(0)
                    if not options.renormalize or total < T.float32(LEAST_SUM):
                        inner = T.warp_reduce_sum(grad[0] * value)
                    # A token without an expert gets zeros, whatever its logits are.
                    has_expert = T.any_sync(expert >= 0) != 0
                    scale = (T.float32(0) - inner) / sums[1]
                    for j in T.unroll(per_lane):
                        row[j] = T.cast(T.if_then_else(has_expert, x[j] * scale, T.float32(0)), dtype)
                else:
                    for j in T.unroll(per_lane):
                        row[j] = T.cast(T.float32(0), dtype)
                for c in T.unroll(chunks):
                    if (c * 32 + lane) * vector < num_experts:
                        for v in T.vectorized(vector):
                            grad_logits[token, (c * 32 + lane) * vector + v] = row[c * vector + v]
                add_up(grad, expert, num_topk, lane)
                # The stores of the whole row come before the stores that overwrite the slots' elements.
                T.sync_warp()
                if expert >= 0:
                    if is_softmax:
                        grad_logits[token, expert] = T.cast(value * (grad[0] - inner), dtype)
                    else:
                        grad_logits[token, expert] = T.cast(grad[0] * slope(scoring_func, logit, value), dtype)

    return gate_weights_bwd


@op(aligned=())
def gate_weights_bwd(
    grad_weights: Tensor,
    logits: Tensor,
    topk_idx: Tensor,
    scoring_func: ScoringFunc | str,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Gradient of a gate's logits from the gradient of the weights that the gate returned.

    The gate is `topk_gate_with_weights` or `hash_gate` with the same options, or `top2_sum_gate`, which always
    renormalizes. The choice of experts and the bias have no gradient. A sum of scores below 1e-20, which is raised to
    1e-20, is a constant. Where a sqrtsoftplus score is 0, its slope is 0.

    Args:
        grad_weights: float32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        logits: bfloat16 or float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous: columns of logits, that is, experts before
            `top2_sum_gate` maps them to physical ones or to ranks (its `unmapped_topk_idx`). An index outside 0 …
            num_experts-1 is ignored with its gradient: it is no expert, or a shared one, whose weight is constant.
            (Negative indices of a routing given to `top2_sum_gate`, which weighs them as expert 0, must be 0 here.)
        scoring_func: The gate's scoring function. The next two arguments are also as the gate had them.
        renormalize: Whether weights were divided by their sum.
        routed_scaling_factor: The factor of the weights.

    Returns:
        (num_tokens, num_experts) in logits' dtype; zeros for a token without an expert.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, stride or device, or a size out of range.
    """
    num_tokens, num_topk = check.tensor("grad_weights", grad_weights, (torch.float32,), ("num_tokens", "num_topk"))
    device = grad_weights.device
    check.in_range("num_topk (columns of grad_weights)", num_topk, 1, MAX_TOPK)
    _, num_experts = check.tensor("logits", logits, LOGIT_DTYPES, (num_tokens, "num_experts"), device=device)
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    check.tensor("topk_idx", topk_idx, IDX_DTYPES, (num_tokens, num_topk), device=device)
    scoring_func = scoring_func_of(scoring_func)
    check.flag("renormalize", renormalize)
    check.number("routed_scaling_factor", routed_scaling_factor)
    grad_logits = new(logits.new_empty, (num_tokens, num_experts))
    if launching(grad_logits):
        options = GateOptions(scoring_func, renormalize, False, False, True, topk_idx.dtype, None)
        alignment = check.row_alignment(logits)
        bwd = _gate_weights_bwd_kernel(num_experts, num_topk, logits.dtype, options, alignment, get_arch(device))
        bwd(grad_weights, logits, topk_idx, float(routed_scaling_factor), grad_logits)
    return grad_logits
