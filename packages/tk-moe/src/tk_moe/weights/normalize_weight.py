"""normalize_weight: each token's expert weights divided by their sum.

    denominator[t] = 1e-20 + w[t, 0] + w[t, 1] + …       (float32, added in that order)
    normalized[t, k] = w[t, k] / denominator[t]          (IEEE division)

w and normalized float32 (num_tokens, num_topk), denominator float32 (num_tokens). A thread takes a token.
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

MAX_TOPK = 32


@dataclass(frozen=True)
class NormalizeWeightConfig:
    """Launch knobs."""

    threads: int

    @staticmethod
    @cache
    def best(arch: Arch) -> "NormalizeWeightConfig":
        """Small blocks, so that 8192 tokens reach most multiprocessors. Untuned."""
        return NormalizeWeightConfig(threads=64)


# Every access stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _normalize_weight_kernel(num_topk: int, alignment: int, config: NormalizeWeightConfig, arch: Arch) -> Any:
    """`alignment`: what the address of each row of w and normalized is a multiple of, in bytes."""
    import tilelang.language as T

    vector = alignment // 4
    threads = config.threads
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize_weight(
        w: T.Tensor((num_tokens, num_topk), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            weights = T.alloc_local((num_topk,), "float32")
            total = T.alloc_var("float32")
            if token < num_tokens:
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        weights[c * vector + v] = w[token, c * vector + v]
                total = T.float32(1e-20)
                for k in T.unroll(num_topk):
                    total = total + weights[k]
                denominator[token] = total
                for k in T.unroll(num_topk):
                    weights[k] = weights[k] / total
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        normalized[token, c * vector + v] = weights[c * vector + v]

    return normalize_weight


def _normalize_weight_reference(w: torch.Tensor, denominator: torch.Tensor, normalized: torch.Tensor) -> None:
    from tk_moe.reference.weights.normalize_weight import normalize_weight

    for out, value in zip((denominator, normalized), normalize_weight(w), strict=True):
        out.copy_(value)


@op("tk_moe::normalize_weight_out", mutates=("denominator", "normalized"), reference=_normalize_weight_reference)
def _normalize_weight_out(w: torch.Tensor, denominator: torch.Tensor, normalized: torch.Tensor) -> None:
    num_tokens, num_topk = w.shape
    if num_tokens == 0:
        return
    arch = get_arch(w.device)
    alignment = min(check.row_alignment(w), check.row_alignment(normalized))
    _normalize_weight_kernel(num_topk, alignment, NormalizeWeightConfig.best(arch), arch)(w, denominator, normalized)


@replayable
def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    denominator = topk_weights.new_empty((num_tokens,))
    normalized = topk_weights.new_empty((num_tokens, num_topk))
    _normalize_weight_out(topk_weights, denominator, normalized)
    return denominator, normalized
