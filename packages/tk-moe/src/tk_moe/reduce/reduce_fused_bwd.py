"""reduce_fused_bwd: gradients of `reduce_fused` for the experts' rows and the weights; pos = token_topk_to_pos[t, k].

    grad_x[pos] = round(topk_weights[t, k] · grad[t])        (float32; rows of padding are zero)
    grad_topk_weights[t, k] = Σ_h grad[t, h] · x[pos, h]     (float32; 0 for a pair without a position)

grad (num_tokens, hidden), x and grad_x (num_expanded_tokens, hidden), each bf16 or float32, topk_weights float32 and
token_topk_to_pos int32 (num_tokens, num_topk), pos_to_expert int32 (num_expanded_tokens).

One launch reads and writes every row once. Of G blocks, block b handles token b. A thread takes one 16-byte vector of
columns at a time, and loads it from up to 8 of the num_topk rows of x before it uses the first, while grad stays in
registers. Then the block zeroes the padding among the rows b, b + G, b + 2G, …, as `expand_to_fused` does.

    grad     row b ── registers ──┬──────── · weight ───────┬──────── · weight ────
    x                      ...  [ p0 ] ─ dot product ...  [ p1 ] ─ dot product
    grad_x                 ...  [ p0 ]      [ pad ]  ...  [ p1 ]

A dot product is added in one order, which depends on hidden, num_topk and x's dtype alone: by fused multiply-adds over
a thread's columns, ascending; over the lanes of a warp in a tree (lane l and l xor 16, then 8, 4, 2, 1); over the
warps, ascending.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_moe.lib.check_maps import check_each_once, check_experts
from tk_moe.lib.expand_to_fused_kernel import PADDING_ROWS, num_blocks_for

_DTYPES = (torch.bfloat16, torch.float32)
MAX_TOPK = 32

_VECTOR_BYTES = 16
_MAX_ROWS_IN_FLIGHT = 8
"""Rows that a thread loads before it uses the first, 4 registers each."""


@kernel(pass_configs=DIRECT_COPIES)
def _reduce_bwd_kernel(
    hidden: int, num_topk: int, grad_dtype: torch.dtype, dtype: torch.dtype, has_weights: bool, arch: Arch
) -> Any:
    """Without weights, x, topk_weights and grad_topk_weights are None."""
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import load_experts, load_positions, vectors_of_threads, zero_padding

    vector = _VECTOR_BYTES // dtype.itemsize
    num_vectors = hidden // vector
    # Chunks of a row, one after another, a vector per thread: few of up to 224 threads, and few idle threads. They fix
    # the order of sums in dot products, so must not depend on num_tokens. A second chunk loads its rows while stores of
    # the first are in flight. So there are at least two, unless rows are short, or there are so many slots that their
    # sums, kept from chunk to chunk, take too many registers.
    least = max(ceil_div(num_vectors, 224), 2 if num_vectors > 64 and num_topk <= 16 else 1)
    num_chunks = min(range(least, least + 4), key=lambda chunks: chunks * align(ceil_div(num_vectors, chunks), 32))
    threads = align(ceil_div(num_vectors, num_chunks), 32)
    warps, block_channels = threads // 32, threads * vector
    rows_in_flight = min(num_topk, _MAX_ROWS_IN_FLIGHT)
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")

    @T.macro
    def sum_products(token: Any, dots: T.Buffer, grad_topk_weights: T.Buffer) -> None:
        """Sum the threads' parts of the dot products over the block, and write the sums to grad_topk_weights."""
        warp_sums = T.alloc_fragment((num_topk, warps), "float32")
        shared_sums = T.alloc_shared((num_topk, warps), "float32")
        T.reduce_sum(T.reshape(dots, (num_topk, warps, 32)), warp_sums, dim=2)
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
        with T.Kernel(num_blocks, threads=threads) as block:
            T.annotate_min_blocks_per_sm((512 if num_topk <= 8 else 256) // threads)
            pos = T.alloc_local((num_topk,), "int32")
            scale = T.alloc_local((num_topk,), "float32")
            dots = T.alloc_fragment((num_topk, threads), "float32")
            rows = T.alloc_fragment((rows_in_flight, block_channels), dtype)
            grads = T.alloc_fragment((block_channels,), grad_dtype)
            scaled = T.alloc_fragment((block_channels,), dtype)
            experts = T.alloc_fragment((PADDING_ROWS,), "int32")
            shared_experts = T.alloc_shared((PADDING_ROWS,), "int32")
            T.annotate_layout({x: vectors_of_threads(x.shape, vector, threads) for x in (rows, grads, scaled)})
            T.annotate_layout({dots: T.Fragment(dots.shape, forward_fn=lambda k, t: (t, k))})
            load_experts(pos_to_expert, block, num_blocks, experts)
            if block < num_tokens:
                load_positions(token_topk_to_pos, block, num_expanded_tokens, pos)
                for k in T.unroll(num_topk):
                    scale[k] = topk_weights[block, k] if has_weights else T.float32(1)
                T.clear(dots)
                for chunk in T.serial(num_chunks):
                    first = chunk * block_channels
                    T.copy(grad[block, first : first + block_channels], grads)
                    for group in T.unroll(ceil_div(num_topk, rows_in_flight)):
                        if has_weights:
                            for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                                k = group * rows_in_flight + i
                                for c in T.Parallel(block_channels):
                                    is_read = pos[k] >= 0 and first + c < hidden
                                    rows[i, c] = T.if_then_else(is_read, x[pos[k], first + c], T.cast(0, dtype))
                        for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                            k = group * rows_in_flight + i
                            if pos[k] >= 0:
                                if has_weights:
                                    for t in T.Parallel(threads):
                                        for v in T.unroll(vector):
                                            dots[k, t] = T.ieee_fmaf(
                                                T.cast(grads[t * vector + v], "float32"),
                                                T.cast(rows[i, t * vector + v], "float32"),
                                                dots[k, t],
                                            )
                                for c in T.Parallel(block_channels):
                                    scaled[c] = T.cast(scale[k] * T.cast(grads[c], "float32"), dtype)
                                T.copy(scaled, grad_x[pos[k], first : first + block_channels])
                if has_weights:
                    sum_products(block, dots, grad_topk_weights)
            T.copy(experts, shared_experts)
            zero_padding(shared_experts, block, num_blocks, scaled, grad_x)

    return reduce_fused_bwd


@op
def reduce_fused_bwd(
    grad: Tensor, x: Tensor | None, topk_weights: Tensor | None, token_topk_to_pos: Tensor, pos_to_expert: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `reduce_fused(x, topk_weights, token_topk_to_pos)` with respect to x and topk_weights.

    grad_x[token_topk_to_pos[t, k]] = topk_weights[t, k] · grad[t], multiplied in float32, then rounded to
    grad_x's dtype; grad_topk_weights[t, k] = Σ_h grad[t, h] · x[token_topk_to_pos[t, k], h] in float32, added in a
    fixed order.

    Args:
        grad: (num_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0.
        x: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous: the rows that the forward pass reduced.
            Needed with topk_weights only; None otherwise.
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
    num_expanded_tokens = check_experts(pos_to_expert, device)
    dtype = grad.dtype
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (num_tokens, num_topk), device=device)
        check.tensor("x", x, _DTYPES, (num_expanded_tokens, hidden), device=device)
        dtype = x.dtype
    else:
        check.require(x is None, "x", "None without topk_weights", type(x))
    check_each_once(token_topk_to_pos, pos_to_expert)
    grad_x = new(grad.new_empty, (num_expanded_tokens, hidden), dtype=dtype)
    grad_topk_weights = None
    if topk_weights is not None:
        grad_topk_weights = new(grad.new_empty, (num_tokens, num_topk), dtype=torch.float32)
    if launching(grad_x, grad_topk_weights):
        if grad_x.numel() == 0:
            grad_topk_weights.zero_()
        else:
            is_weighted, num_blocks = topk_weights is not None, num_blocks_for(num_tokens, num_expanded_tokens)
            backward = _reduce_bwd_kernel(hidden, num_topk, grad.dtype, dtype, is_weighted, get_arch(device))
            inputs = grad, x, topk_weights, token_topk_to_pos, pos_to_expert
            backward(*inputs, grad_x, grad_topk_weights, num_blocks)
    return grad_x, grad_topk_weights
