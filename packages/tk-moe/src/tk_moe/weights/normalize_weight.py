"""normalize_weight: each token's expert weights divided by their sum.

    denominator[t] = 1e-20 + w[t, 0] + w[t, 1] + …       (float32, added in that order)
    normalized[t, k] = w[t, k] / denominator[t]          (IEEE division)

w and normalized float32 (num_tokens, num_topk), denominator float32 (num_tokens). One thread per token.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_moe.lib.launch_aligned import launch_aligned

MAX_TOPK = 32
BLOCK_TOKENS = 64
"""Tokens of a thread block, one per thread, here and in the backward: few, so that 8192 tokens occupy most SMs."""


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
        with T.Kernel(T.ceildiv(num_tokens, BLOCK_TOKENS), threads=BLOCK_TOKENS) as block:
            first = block * BLOCK_TOKENS
            end = first + BLOCK_TOKENS
            weights = T.alloc_fragment((BLOCK_TOKENS, num_topk), "float32")
            total = T.alloc_fragment((BLOCK_TOKENS,), "float32")
            T.annotate_layout({weights: T.Fragment(weights.shape, forward_fn=lambda t, k: (t, k))})
            T.copy(w[first:end, :], weights)
            for t in T.Parallel(BLOCK_TOKENS):
                total[t] = T.float32(1e-20)
                for k in T.unroll(num_topk):
                    total[t] = total[t] + weights[t, k]
            T.copy(total, denominator[first:end])
            for t, k in T.Parallel(BLOCK_TOKENS, num_topk):
                if first + t < num_tokens:  # dividing the zeros past the last token takes longer
                    weights[t, k] = weights[t, k] / total[t]
            T.copy(weights, normalized[first:end, :])

    return normalize_weight


@op("tk_moe::normalize_weight_out", mutates=("denominator", "normalized"), reference="normalize_weight")
def _normalize_weight_out(topk_weights: Tensor, denominator: Tensor, normalized: Tensor) -> None:
    num_tokens, num_topk = topk_weights.shape
    if num_tokens == 0:
        return
    arch = get_arch(topk_weights.device)
    outputs = denominator, normalized
    launch_aligned(_normalize_weight_kernel(num_topk, arch), topk_weights, *outputs, outputs=outputs)


@replayable
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
    denominator = topk_weights.new_empty((num_tokens,))
    normalized = topk_weights.new_empty((num_tokens, num_topk))
    _normalize_weight_out(topk_weights, denominator, normalized)
    return denominator, normalized
