"""reduce_fused_bwd: gradients of `reduce_fused` by the experts' rows and by the weights, for positions pos of (t, k).

    grad_x[pos] = round(topk_weights[t, k] · grad[t])        (float32; rows of padding are zero)
    grad_topk_weights[t, k] = Σ_h grad[t, h] · x[pos, h]     (float32; 0 for a pair without a position)

grad (num_tokens, hidden), x and grad_x (num_expanded_tokens, hidden), both bf16 or float32, topk_weights float32 and
token_topk_to_pos int32 (num_tokens, num_topk), pos_to_expert int32 (num_expanded_tokens).

One launch reads and writes every row once. Of G thread blocks, block b computes token b, some channels at a time; a
thread has one 16-byte vector of them in every row of x. It loads the vectors of all num_topk rows (8 at most) before it
uses the first. Then the block zeroes the padding among the rows b, b + G, b + 2G, …, as `expand_to_fused` does.

    grad      row b         [ thread 0 | thread 1 | … ]      each field 8 channels for x in bfloat16, 4 in float32
    x         row pos[0]    [ thread 0 | thread 1 | … ]      · grad, summed
    grad_x    row pos[0]    [ thread 0 | thread 1 | … ]      grad · weight 0
    …

The order of a dot product's sum depends on hidden and x's dtype alone: fused multiply-adds over a thread's channels,
ascending; a tree over the lanes of a warp (lane l and l xor 16, then 8, 4, 2, 1); then over the warps, ascending.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import aligned
from tk_moe.expand.expand_to_fused import check_maps
from tk_moe.lib.expand_to_fused_kernel import ExpandConfig

_DTYPES = (torch.bfloat16, torch.float32)
MAX_TOPK = 32

_VECTOR_BYTES = 16


@dataclass(frozen=True)
class ReduceBwdConfig:
    """How one thread block computes a token.

    It determines the order of the dot products' sums, so it must not depend on num_tokens.
    """

    threads: int
    num_chunks: int
    """Parts in which a token's channels are computed one after the other, a vector for each thread."""
    threads_per_sm: int
    """Threads that an SM should hold, which limits the registers of each."""

    max_rows_in_flight = 8
    """Rows that a thread loads before it uses the first, in 4 registers each."""
    max_padding_rows = ExpandConfig.max_padding_rows
    """Rows that one thread block checks for padding."""

    @staticmethod
    @cache
    def best(num_vectors: int, num_topk: int, arch: Arch) -> "ReduceBwdConfig":
        """The configuration for rows of `num_vectors` vectors: few chunks of up to 224 threads, few of them idle.

        The loads of a second chunk overlap the stores of the first, so there are at least two, unless the sums of many
        slots, which are kept from chunk to chunk, take too many registers.
        """
        least = max(ceil_div(num_vectors, 224), 2 if num_vectors > 64 and num_topk <= 16 else 1)
        num_chunks = min(range(least, least + 4), key=lambda chunks: chunks * align(ceil_div(num_vectors, chunks), 32))
        threads = align(ceil_div(num_vectors, num_chunks), 32)
        return ReduceBwdConfig(threads, num_chunks, threads_per_sm=512 if num_topk <= 8 else 256)


@kernel(pass_configs=DIRECT_COPIES)
def _reduce_fused_bwd_kernel(
    hidden: int,
    num_topk: int,
    grad_dtype: torch.dtype,
    dtype: torch.dtype,
    has_weights: bool,
    config: ReduceBwdConfig,
    arch: Arch,
) -> Any:
    """Without weights there are no x, topk_weights and grad_topk_weights."""
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import load_experts, load_positions, vectors_of_threads, zero_padding

    vector, zero, warps = _VECTOR_BYTES // dtype.itemsize, T.cast(0, dtype), config.threads // 32
    block_channels, rows_in_flight = config.threads * vector, min(num_topk, config.max_rows_in_flight)
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")

    @T.macro
    def add_products(grads: T.Buffer, rows: T.Buffer, i: Any, dots: T.Buffer, k: Any) -> None:
        """Add to each thread's part of the dot product of slot k, whose row is rows[i]."""
        for w, lane in T.Parallel(warps, 32):
            for v in T.unroll(vector):
                c = (w * 32 + lane) * vector + v
                dots[k, w, lane] = T.ieee_fmaf(
                    T.cast(grads[c], "float32"), T.cast(rows[i, c], "float32"), dots[k, w, lane]
                )

    @T.macro
    def store_sums(dots: T.Buffer, token: Any, grad_topk_weights: T.Buffer) -> None:
        warp_sums = T.alloc_fragment((num_topk, warps), "float32")
        shared_sums = T.alloc_shared((num_topk, warps), "float32")
        T.reduce_sum(dots, warp_sums, dim=2)
        T.copy(warp_sums, shared_sums)
        for k in T.Parallel(num_topk):
            total = T.alloc_var("float32")
            total = shared_sums[k, 0]
            for w in T.unroll(1, warps):
                total = total + shared_sums[k, w]
            grad_topk_weights[token, k] = total

    @T.prim_func
    def reduce_fused_bwd(
        grad: T.Tensor((num_tokens, hidden), grad_dtype),
        x: T.Tensor((num_expanded_tokens, hidden), dtype),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        grad_x: T.Tensor((num_expanded_tokens, hidden), dtype),
        grad_topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.threads_per_sm // config.threads)
            # -1 for none.
            pos = T.alloc_local((num_topk,), "int32")
            scale = T.alloc_local((num_topk,), "float32")
            grads = T.alloc_fragment((block_channels,), grad_dtype)
            rows = T.alloc_fragment((rows_in_flight, block_channels), dtype)
            scaled = T.alloc_fragment((block_channels,), dtype)
            dots = T.alloc_fragment((num_topk, warps, 32), "float32")
            experts = T.alloc_fragment((config.max_padding_rows,), "int32")
            shared_experts = T.alloc_shared((config.max_padding_rows,), "int32")
            T.annotate_layout(
                {
                    **{x: vectors_of_threads(x.shape, vector, config.threads) for x in (grads, rows, scaled)},
                    dots: T.Fragment(dots.shape, forward_fn=lambda k, w, lane: (w * 32 + lane, k)),
                }
            )
            load_experts(pos_to_expert, block, num_blocks, experts)
            if block < num_tokens:
                load_positions(token_topk_to_pos, block, num_expanded_tokens, pos)
                for k in T.unroll(num_topk):
                    scale[k] = topk_weights[block, k] if has_weights else T.float32(1)
                T.clear(dots)
                for part in T.serial(config.num_chunks):
                    channel = part * block_channels
                    T.copy(grad[block, channel : channel + block_channels], grads)
                    for group in T.unroll(ceil_div(num_topk, rows_in_flight)):
                        if has_weights:
                            for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                                for c in T.Parallel(block_channels):
                                    p = pos[group * rows_in_flight + i]
                                    is_read = p >= 0 and channel + c < hidden
                                    rows[i, c] = T.if_then_else(is_read, x[p, channel + c], zero)
                        for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                            k = group * rows_in_flight + i
                            if pos[k] >= 0:
                                if has_weights:
                                    add_products(grads, rows, i, dots, k)
                                for c in T.Parallel(block_channels):
                                    scaled[c] = T.cast(scale[k] * T.cast(grads[c], "float32"), dtype)
                                T.copy(scaled, grad_x[pos[k], channel : channel + block_channels])
                if has_weights:
                    store_sums(dots, block, grad_topk_weights)
            T.copy(experts, shared_experts)
            zero_padding(shared_experts, block, num_blocks, scaled, grad_x)

    return reduce_fused_bwd


def _reduce_fused_bwd_reference(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    grad_x: torch.Tensor,
    grad_topk_weights: torch.Tensor | None,
) -> None:
    from tk_moe.reference.reduce.reduce_fused_bwd import reduce_fused_bwd

    values = reduce_fused_bwd(grad, x, topk_weights, token_topk_to_pos, pos_to_expert)
    for out, value in zip((grad_x, grad_topk_weights), values, strict=True):
        if out is not None and value is not None:
            out.copy_(value)


@op(
    "tk_moe::reduce_fused_bwd_out",
    mutates=("grad_x", "grad_topk_weights"),
    reference=_reduce_fused_bwd_reference,
)
def _reduce_fused_bwd_out(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    grad_x: torch.Tensor,
    grad_topk_weights: torch.Tensor | None,
) -> None:
    """Launch."""
    num_expanded_tokens, hidden = grad_x.shape
    num_tokens, num_topk = token_topk_to_pos.shape
    if num_expanded_tokens == 0 or hidden == 0:
        if grad_topk_weights is not None:
            grad_topk_weights.zero_()
        return
    arch = get_arch(grad.device)
    has_weights = topk_weights is not None
    config = ReduceBwdConfig.best(hidden * grad_x.itemsize // _VECTOR_BYTES, num_topk, arch)
    written = aligned(grad_x)
    backward = _reduce_fused_bwd_kernel(hidden, num_topk, grad.dtype, grad_x.dtype, has_weights, config, arch)
    backward(
        *(aligned(grad), None if x is None else aligned(x), topk_weights, token_topk_to_pos, pos_to_expert),
        *(written, grad_topk_weights, ExpandConfig.num_blocks(num_tokens, num_expanded_tokens)),
    )
    if written is not grad_x:
        grad_x.copy_(written)


@replayable
def reduce_fused_bwd(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by x and topk_weights of `reduce_fused(x, topk_weights, token_topk_to_pos)`.

    grad_x[token_topk_to_pos[t, k]] = topk_weights[t, k] · grad[t], multiplied in float32 and rounded once more to
    grad_x's dtype; grad_topk_weights[t, k] = Σ_h grad[t, h] · x[token_topk_to_pos[t, k], h] in float32, added in a
    fixed order.

    Args:
        grad: (num_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0.
        x: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous: what the forward pass reduced. Needed with
            topk_weights only; None otherwise.
        topk_weights: float32 (num_tokens, num_topk), or None if the forward pass had none (all ones).
        token_topk_to_pos: int32 (num_tokens, num_topk), num_topk from 1 to 32; negative means none, and a position past
            the last row is ignored.
        pos_to_expert: int32 (num_expanded_tokens,); negative marks padding. Every other row must be the position of
            exactly one (token, slot), else its gradient is unspecified (`TK_DEBUG=1` raises ValueError).

    Returns:
        grad_x: (num_expanded_tokens, hidden) of x's dtype (grad's without x); rows of padding are zero.
        grad_topk_weights: float32 (num_tokens, num_topk), 0 for a pair without a position; None without topk_weights.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device, or x and topk_weights not both
            given or both None.
    """
    num_tokens, hidden = check.tensor("grad", grad, _DTYPES, ("num_tokens", "hidden"))
    check.multiple_of("hidden (columns of grad)", hidden, 64)
    device = grad.device
    _, num_topk = check.tensor(
        "token_topk_to_pos", token_topk_to_pos, (torch.int32,), (num_tokens, "num_topk"), device=device
    )
    check.in_range("num_topk (columns of token_topk_to_pos)", num_topk, 1, MAX_TOPK)
    (num_expanded_tokens,) = check.tensor(
        "pos_to_expert", pos_to_expert, (torch.int32,), ("num_expanded_tokens",), device=device
    )
    dtype = grad.dtype
    grad_topk_weights = None
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (num_tokens, num_topk), device=device)
        check.tensor("x", x, _DTYPES, (num_expanded_tokens, hidden), device=device)
        dtype = x.dtype
        grad_topk_weights = grad.new_empty((num_tokens, num_topk), dtype=torch.float32)
    else:
        check.require(x is None, "x", "None without topk_weights", type(x))
    if not torch.compiler.is_compiling() and env.debug():
        check_maps(token_topk_to_pos, pos_to_expert)
    grad_x = grad.new_empty((num_expanded_tokens, hidden), dtype=dtype)
    _reduce_fused_bwd_out(grad, x, topk_weights, token_topk_to_pos, pos_to_expert, grad_x, grad_topk_weights)
    return grad_x, grad_topk_weights
