"""normalize_weight: each token's expert weights divided by their sum; normalize_weight_bwd: its gradient by w.

    denominator[t] = 1e-20 + w[t, 0] + w[t, 1] + …       (float32, added in that order)
    normalized[t, k] = w[t, k] / denominator[t]          (IEEE division)

    dot[t] = grad_normalized[t, 0] · normalized[t, 0] + grad_normalized[t, 1] · normalized[t, 1] + …
    grad_w[t, k] = (grad_normalized[t, k] - dot[t]) / denominator[t]  [+ grad_denominator[t]]

w and normalized float32 (num_tokens, num_topk), denominator float32 (num_tokens). Products and sums in that order, each
rounded, so every bit is defined. The gradient takes the outputs of the forward pass, not its input w: normalized is
kept for `reduce_fused_bwd` anyway, and denominator is one number per token, where w would be num_topk. One thread per
token.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

MAX_TOPK = 32
_BLOCK_TOKENS = 64
"""Tokens of a thread block, one per thread: few, so that 8192 tokens occupy most SMs."""


@kernel(pass_configs=DIRECT_COPIES)
def _normalize_weight_kernel(num_topk: int, arch: Arch) -> Any:
    import tilelang.language as T

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize_weight(
        w: T.Tensor((num_tokens, num_topk), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=_BLOCK_TOKENS) as block:
            first = block * _BLOCK_TOKENS
            end = first + _BLOCK_TOKENS
            weights = T.alloc_fragment((_BLOCK_TOKENS, num_topk), "float32")
            total = T.alloc_fragment((_BLOCK_TOKENS,), "float32")
            T.annotate_layout({weights: T.Fragment(weights.shape, forward_fn=lambda t, k: (t, k))})
            T.copy(w[first:end, :], weights)
            for t in T.Parallel(_BLOCK_TOKENS):
                total[t] = T.float32(1e-20)
                for k in T.unroll(num_topk):
                    total[t] = total[t] + weights[t, k]
            T.copy(total, denominator[first:end])
            for t, k in T.Parallel(_BLOCK_TOKENS, num_topk):
                if first + t < num_tokens:  # dividing the zeros past the last token takes longer
                    weights[t, k] = weights[t, k] / total[t]
            T.copy(weights, normalized[first:end, :])

    return normalize_weight


@kernel(pass_configs=DIRECT_COPIES)
def _normalize_weight_bwd_kernel(num_topk: int, has_grad_denominator: bool, arch: Arch) -> Any:
    import tilelang.language as T

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize_weight_bwd(
        grad_normalized: T.Tensor((num_tokens, num_topk), "float32"),
        grad_denominator: T.Tensor((num_tokens,), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
        grad_w: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=_BLOCK_TOKENS) as block:
            first = block * _BLOCK_TOKENS
            end = first + _BLOCK_TOKENS
            grads, weights = (T.alloc_fragment((_BLOCK_TOKENS, num_topk), "float32") for _ in range(2))
            divisors, added, dots = (T.alloc_fragment((_BLOCK_TOKENS,), "float32") for _ in range(3))
            T.annotate_layout({x: T.Fragment(x.shape, forward_fn=lambda t, k: (t, k)) for x in (grads, weights)})
            T.copy(grad_normalized[first:end, :], grads)
            T.copy(normalized[first:end, :], weights)
            T.copy(denominator[first:end], divisors)
            if has_grad_denominator:
                T.copy(grad_denominator[first:end], added)
            for t in T.Parallel(_BLOCK_TOKENS):
                dots[t] = grads[t, 0] * weights[t, 0]
            for t in T.Parallel(_BLOCK_TOKENS):
                for k in T.unroll(1, num_topk):
                    dots[t] = dots[t] + grads[t, k] * weights[t, k]
            for t, k in T.Parallel(_BLOCK_TOKENS, num_topk):
                if first + t < num_tokens:  # dividing the zeros past the last token takes longer
                    grad = (grads[t, k] - dots[t]) / divisors[t]
                    weights[t, k] = grad + added[t] if has_grad_denominator else grad
            T.copy(weights, grad_w[first:end, :])

    return normalize_weight_bwd


@op
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each token's weights by 1e-20 plus their sum, added from the first to the last.

    Args:
        topk_weights: float32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.

    Returns:
        denominator: float32 (num_tokens).
        normalized: float32 (num_tokens, num_topk), topk_weights / denominator.

    Raises:
        TypeError: topk_weights is not a float32 tensor.
        ValueError: topk_weights has another shape or is not contiguous, or num_topk is out of range.
    """
    num_tokens, num_topk = check.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", "num_topk"))
    check.in_range("num_topk (columns of topk_weights)", num_topk, 1, MAX_TOPK)
    denominator = new(topk_weights.new_empty, (num_tokens,))
    normalized = new(topk_weights.new_empty, (num_tokens, num_topk))
    if launching(denominator, normalized):
        _normalize_weight_kernel(num_topk, get_arch(topk_weights.device))(topk_weights, denominator, normalized)
    return denominator, normalized


@op
def normalize_weight_bwd(
    grad_normalized: Tensor, grad_denominator: Tensor | None, denominator: Tensor, normalized: Tensor
) -> Tensor:
    """Gradient of `denominator, normalized = normalize_weight(w)` with respect to w.

    grad_w[t, k] = (grad_normalized[t, k] - Σ_j grad_normalized[t, j] · normalized[t, j]) / denominator[t] +
    grad_denominator[t], the sum from the first to the last.

    Args:
        grad_normalized: float32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        grad_denominator: float32 (num_tokens), or None if nothing depends on the denominator.
        denominator: float32 (num_tokens), as `normalize_weight` returned it.
        normalized: float32 (num_tokens, num_topk), as `normalize_weight` returned it.

    Returns:
        float32 (num_tokens, num_topk).

    Raises:
        TypeError: an argument is not a float32 tensor.
        ValueError: a shape or device does not fit, a tensor is not contiguous, or num_topk is out of range.
    """
    dtypes = (torch.float32,)
    num_tokens, num_topk = check.tensor("grad_normalized", grad_normalized, dtypes, ("num_tokens", "num_topk"))
    check.in_range("num_topk (columns of grad_normalized)", num_topk, 1, MAX_TOPK)
    device = grad_normalized.device
    if grad_denominator is not None:
        check.tensor("grad_denominator", grad_denominator, dtypes, (num_tokens,), device=device)
    check.tensor("denominator", denominator, dtypes, (num_tokens,), device=device)
    check.tensor("normalized", normalized, dtypes, (num_tokens, num_topk), device=device)
    grad_w = new(normalized.new_empty, (num_tokens, num_topk))
    if launching(grad_w):
        backward = _normalize_weight_bwd_kernel(num_topk, grad_denominator is not None, get_arch(device))
        backward(grad_normalized, grad_denominator, denominator, normalized, grad_w)
    return grad_w
