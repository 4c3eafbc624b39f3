"""aux_loss: the auxiliary loss that evens out experts' load, from scores and `aux_fi`; aux_loss_bwd: its gradient.

    sum[t]  = Σ_e scores[t, e]
    part[t] = Σ_e fi[e] · scores[t, e] / (1e-20 + sum[t])
    loss    = (alpha / num_tokens) · Σ_t part[t]

    grad_scores[t, e] = grad_loss · (alpha / num_tokens) · (fi[e] - part[t]) / (1e-20 + sum[t]),  0 where sum[t] = 0

The loss is alpha · Σ_e fi[e] · P[e] with P[e] the mean of scores[t, e] / (1e-20 + sum[t]) over tokens. scores float32
(num_tokens, num_experts), fi float32 (num_experts), loss and grad_loss float32 (). fi holds counts, so it gets no
gradient.

A thread block takes four tokens, one warp each, and a thread takes four consecutive experts of every 128:

    token 0    [ thread 0 | thread 1 | … | thread 31 | thread 0 | … ]      each field 4 experts, one 16-byte load
    token 1    [ thread 32 | …                                      ]

A second launch, of one thread block, sums the parts. The order of all sums is fixed, so that the bits of the loss
depend on its inputs alone:

    1. Within a token a thread adds its experts, ascending; then the lanes are added in a tree (lane l and l xor 16,
       then 8, 4, 2, 1).
    2. Thread s of 256 adds the parts of tokens s, s + 256, s + 512, …, ascending.
    3. The lanes of each of the 8 warps are added in the same tree, then the warps, ascending.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

MAX_EXPERTS = 1024
MAX_TOKENS = 2**30  # so that no index on the way overflows an int32

_BLOCK_TOKENS = 4
"""Tokens of a thread block, a warp each. For the gradient, 2 to 8 take the same time on an H200."""
_SUM_THREADS = 256
"""Threads of the block that sums the parts. Their number decides the order of the sum."""
_PARTS_IN_FLIGHT = 32
"""Parts that a thread of that block loads before it adds the first."""


@kernel(pass_configs=DIRECT_COPIES)
def _aux_loss_parts_kernel(num_experts: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_moe.lib.score_tiles import load_and_sum

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def aux_loss_parts(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        fi: T.Tensor((num_experts,), "float32"),
        parts: T.Tensor((num_tokens,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=32 * _BLOCK_TOKENS) as block:
            first = block * _BLOCK_TOKENS
            _, _, sums, dots = load_and_sum(scores, fi, first, _BLOCK_TOKENS)
            for t in T.Parallel(_BLOCK_TOKENS):
                if first + t < num_tokens:  # dividing the zeros past the last token takes longer
                    dots[t] = dots[t] / (T.float32(1e-20) + sums[t])
            T.copy(dots, parts[first : first + _BLOCK_TOKENS])

    return aux_loss_parts


@kernel(pass_configs=DIRECT_COPIES)
def _aux_loss_sum_kernel(arch: Arch) -> Any:
    import tilelang.language as T

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def aux_loss_sum(
        parts: T.Tensor((num_tokens,), "float32"), alpha: T.float32, loss: T.Tensor((1,), "float32")
    ) -> None:
        with T.Kernel(1, threads=_SUM_THREADS):
            values = T.alloc_fragment((_PARTS_IN_FLIGHT, _SUM_THREADS), "float32")
            thread_sums = T.alloc_fragment((_SUM_THREADS,), "float32")
            warp_sums = T.alloc_fragment((_SUM_THREADS // 32,), "float32")
            shared_sums = T.alloc_shared((_SUM_THREADS // 32,), "float32")
            total = T.alloc_var("float32")
            T.annotate_layout({values: T.Fragment(values.shape, forward_fn=lambda i, s: (s, i))})
            T.annotate_layout({thread_sums: T.Fragment(thread_sums.shape, forward_fn=lambda s: (s, 0))})
            T.clear(thread_sums)
            for batch in T.serial(T.ceildiv(num_tokens, _PARTS_IN_FLIGHT * _SUM_THREADS)):
                for i, s in T.Parallel(_PARTS_IN_FLIGHT, _SUM_THREADS):
                    token = (batch * _PARTS_IN_FLIGHT + i) * _SUM_THREADS + s
                    values[i, s] = T.if_then_else(token < num_tokens, parts[token], T.float32(0))
                for i in T.unroll(_PARTS_IN_FLIGHT):
                    for s in T.Parallel(_SUM_THREADS):
                        thread_sums[s] = thread_sums[s] + values[i, s]
            T.reduce_sum(T.reshape(thread_sums, (_SUM_THREADS // 32, 32)), warp_sums, dim=1)
            T.copy(warp_sums, shared_sums)
            total = shared_sums[0]
            for i in T.unroll(1, _SUM_THREADS // 32):
                total = total + shared_sums[i]
            for i in T.Parallel(1):
                loss[i] = total / T.cast(num_tokens, "float32") * alpha

    return aux_loss_sum


@kernel(pass_configs=DIRECT_COPIES)
def _aux_loss_bwd_kernel(num_experts: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_moe.lib.score_tiles import load_and_sum

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def aux_loss_bwd(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        fi: T.Tensor((num_experts,), "float32"),
        grad_loss: T.Tensor((1,), "float32"),
        alpha: T.float32,
        grad_scores: T.Tensor((num_tokens, num_experts), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=32 * _BLOCK_TOKENS) as block:
            first = block * _BLOCK_TOKENS
            scale = T.alloc_var("float32")
            scale = grad_loss[0] * (alpha / T.cast(num_tokens, "float32"))
            values, factors, sums, dots = load_and_sum(scores, fi, first, _BLOCK_TOKENS)
            for t, e in T.Parallel(*values.shape):
                # 1 past the last token, where a division by 1e-20 would take longer.
                divisor = T.if_then_else(first + t < num_tokens, T.float32(1e-20) + sums[t], T.float32(1))
                gradient = (factors[t, e] - dots[t] / divisor) / divisor * scale
                values[t, e] = T.if_then_else(sums[t] == T.float32(0), T.float32(0), gradient)
            T.copy(values, grad_scores[first : first + _BLOCK_TOKENS, 0 : values.shape[1]])

    return aux_loss_bwd


def _check_arguments(scores: Tensor, fi: Tensor, alpha: float) -> None:
    num_tokens, num_experts = check.tensor("scores", scores, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of scores)", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_tokens (rows of scores)", num_tokens, 0, MAX_TOKENS)
    check.tensor("fi", fi, (torch.float32,), (num_experts,), device=scores.device)
    check.number("alpha", alpha)


@op
def aux_loss(scores: Tensor, fi: Tensor, alpha: float = 1.0) -> Tensor:
    """Auxiliary loss that evens out the experts' load: alpha · Σ_e fi[e] · P[e].

    P[e] is the mean over tokens of scores[t, e] / (1e-20 + Σ_e scores[t, e]). With fi = aux_fi(topk_idx, num_experts,
    num_topk) of one sequence this is the sequence-wise balance loss of DeepSeek-V3 (section 2.1.2 of its technical
    report).

    Args:
        scores: float32 (num_tokens, num_experts), contiguous: the scores of all experts, not negative; num_experts
            from 1 to 1024, num_tokens to 2³⁰. A token whose scores are all 0 adds nothing.
        fi: float32 (num_experts), as `aux_fi` gives it.
        alpha: Weight of the loss.

    Returns:
        float32 (); 0 without tokens. The order of all sums is fixed, so that its bits are the same on every device and
        for any `num_sms`; within rtol 1e-5 of the exact value.

    Raises:
        TypeError: a tensor is not float32, or alpha is not a number.
        ValueError: a shape or device does not fit, a tensor is not contiguous, or a size is out of range.
    """
    _check_arguments(scores, fi, alpha)
    loss = new(scores.new_empty, ())
    if launching(loss):
        num_tokens, num_experts = scores.shape
        if num_tokens == 0:
            loss.zero_()
        else:
            arch = get_arch(scores.device)
            parts = scores.new_empty((num_tokens,))
            _aux_loss_parts_kernel(num_experts, arch)(scores, fi, parts)
            _aux_loss_sum_kernel(arch)(parts, float(alpha), loss.view(1))
    return loss


@op
def aux_loss_bwd(grad_loss: Tensor, scores: Tensor, fi: Tensor, alpha: float = 1.0) -> Tensor:
    """Gradient of `aux_loss` with respect to scores; fi is a constant.

    grad_scores[t, e] = grad_loss · (alpha / num_tokens) · (fi[e] - part[t]) / (1e-20 + Σ_e scores[t, e]), where
    part[t] = Σ_e fi[e] · scores[t, e] / (1e-20 + Σ_e scores[t, e]). A token whose scores sum to 0 adds nothing to the
    loss, and its gradient is 0.

    Args:
        grad_loss: float32 ().
        scores, fi, alpha: The arguments of `aux_loss`.

    Returns:
        float32 (num_tokens, num_experts).

    Raises:
        TypeError: a tensor is not float32, or alpha is not a number.
        ValueError: a shape or device does not fit, a tensor is not contiguous, or a size is out of range.
    """
    _check_arguments(scores, fi, alpha)
    check.tensor("grad_loss", grad_loss, (torch.float32,), (), device=scores.device)
    grad_scores = new(torch.empty_like, scores)
    if launching(grad_scores):
        backward = _aux_loss_bwd_kernel(scores.shape[1], get_arch(scores.device))
        backward(scores, fi, grad_loss.view(1), float(alpha), grad_scores)
    return grad_scores
