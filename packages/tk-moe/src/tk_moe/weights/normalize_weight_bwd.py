"""normalize_weight_bwd: gradient of `normalize_weight` by its weights.

    dot[t] = grad_normalized[t, 0] · normalized[t, 0] + grad_normalized[t, 1] · normalized[t, 1] + …
    grad_w[t, k] = (grad_normalized[t, k] - dot[t]) / denominator[t]  [+ grad_denominator[t]]

in float32, the products and sums in that order, each rounded, the division IEEE: every bit is defined. It takes what
the forward pass returned, not what went in: the expert weights outlive it anyway, as `reduce_fused_bwd` needs them, and
beside them denominator is one number a token where w would be num_topk. A thread takes a token.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.weights.normalize_weight import MAX_TOPK


@dataclass(frozen=True)
class NormalizeWeightBwdConfig:
    """Launch knobs."""

    threads: int

    @staticmethod
    @cache
    def best(arch: Arch) -> "NormalizeWeightBwdConfig":
        """Small blocks, so that 8192 tokens reach most multiprocessors. Untuned."""
        return NormalizeWeightBwdConfig(threads=64)


# Every access stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _normalize_weight_bwd_kernel(
    num_topk: int, alignment: int, has_grad_denominator: bool, config: NormalizeWeightBwdConfig, arch: Arch
) -> Any:
    """`alignment`: what the address of each row of the matrices is a multiple of, in bytes."""
    import tilelang.language as T

    vector = alignment // 4
    threads = config.threads
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize_weight_bwd(
        grad_normalized: T.Tensor((num_tokens, num_topk), "float32"),
        grad_denominator: T.Tensor((num_tokens,), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
        grad_w: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            grads = T.alloc_local((num_topk,), "float32")
            weights = T.alloc_local((num_topk,), "float32")
            divisor = T.alloc_var("float32")
            added = T.alloc_var("float32")
            dot = T.alloc_var("float32")
            if token < num_tokens:
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        grads[c * vector + v] = grad_normalized[token, c * vector + v]
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        weights[c * vector + v] = normalized[token, c * vector + v]
                divisor = denominator[token]
                if has_grad_denominator:
                    added = grad_denominator[token]
                dot = grads[0] * weights[0]
                for k in T.unroll(1, num_topk):
                    dot = dot + grads[k] * weights[k]
                for k in T.unroll(num_topk):
                    grads[k] = (grads[k] - dot) / divisor
                    if has_grad_denominator:
                        grads[k] = grads[k] + added
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        grad_w[token, c * vector + v] = grads[c * vector + v]

    return normalize_weight_bwd


def _normalize_weight_bwd_reference(
    grad_normalized: torch.Tensor,
    grad_denominator: torch.Tensor | None,
    denominator: torch.Tensor,
    normalized: torch.Tensor,
    grad_w: torch.Tensor,
) -> None:
    from tk_moe.reference.weights.normalize_weight_bwd import normalize_weight_bwd

    grad_w.copy_(normalize_weight_bwd(grad_normalized, grad_denominator, denominator, normalized))


@op("tk_moe::normalize_weight_bwd_out", mutates=("grad_w",), reference=_normalize_weight_bwd_reference)
def _normalize_weight_bwd_out(
    grad_normalized: torch.Tensor,
    grad_denominator: torch.Tensor | None,
    denominator: torch.Tensor,
    normalized: torch.Tensor,
    grad_w: torch.Tensor,
) -> None:
    """Launch."""
    num_tokens, num_topk = normalized.shape
    if num_tokens == 0:
        return
    arch = get_arch(normalized.device)
    alignment = min(check.row_alignment(x) for x in (grad_normalized, normalized, grad_w))
    config = NormalizeWeightBwdConfig.best(arch)
    backward = _normalize_weight_bwd_kernel(num_topk, alignment, grad_denominator is not None, config, arch)
    backward(grad_normalized, grad_denominator, denominator, normalized, grad_w)


@replayable
def normalize_weight_bwd(
    grad_normalized: torch.Tensor,
    grad_denominator: torch.Tensor | None,
    denominator: torch.Tensor,
    normalized: torch.Tensor,
) -> torch.Tensor:
    """Gradient by w of `denominator, normalized = normalize_weight(w)`.

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
    grad_w = normalized.new_empty((num_tokens, num_topk))
    _normalize_weight_bwd_out(grad_normalized, grad_denominator, denominator, normalized, grad_w)
    return grad_w
