"""fused_weight: the product of the gate's two norm weights, which is all that its kernels need of them.

    out = float32(weight_hidden) · float32(weight_embed)

grad_w_reduce: sum the parts of its gradient; add the gradients of both weights in place, in float32.

    grad_w              = Σ_b grad_w_partial[b]
    grad_weight_hidden += grad_w · weight_embed
    grad_weight_embed  += grad_w · weight_hidden

Source: DeepSeek's Engram and its TileKernels. For the product a thread takes eight neighbouring channels. For the sums
a thread block takes 32 neighbouring channels of all parts, so that many thread blocks share the work; 32 parts at a
time, four channels a thread:

    parts      0, 32, 64, …    [ thread 0 | thread 1 | … | thread 7 ]      each field 4 channels, 16 bytes
               1, 33, 65, …    [ thread 8 | …                       ]
               …
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.lib.gate import check_sizes
from tk_engram.sizes import WEIGHT_DTYPES

_THREADS = 128


# They decide the order of the sums, so they must not depend on the number of SMs. Untuned.
_CHANNELS = 32
"""Channels of a thread block, 128 bytes a row; they divide m · H. A thread has four."""
_ROWS = 32
"""Parts that are read at a time."""
_UNROLL = 4
"""Loads of a thread that are in flight: 128 rows in all, nearly all of 132 parts."""


@kernel(pass_configs=DIRECT_COPIES)
def _fused_weight_kernel(size: int, hidden_dtype: torch.dtype, embed_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    tile = VECTOR * _THREADS

    @T.prim_func
    def fused_weight(
        weight_hidden: T.Tensor((size,), hidden_dtype),
        weight_embed: T.Tensor((size,), embed_dtype),
        out: T.Tensor((size,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(size, tile), threads=_THREADS) as block:
            first, last = block * tile, (block + 1) * tile
            hidden_tile = T.alloc_fragment((tile,), hidden_dtype)
            embed_tile = T.alloc_fragment((tile,), embed_dtype)
            product = T.alloc_fragment((tile,), "float32")
            T.copy(weight_hidden[first:last], hidden_tile)
            T.copy(weight_embed[first:last], embed_tile)
            for i in T.Parallel(tile):
                product[i] = T.cast(hidden_tile[i], "float32") * T.cast(embed_tile[i], "float32")
            T.copy(product, out[first:last])

    return fused_weight


@kernel(pass_configs=DIRECT_COPIES)
def _grad_w_reduce_kernel(size: int, hidden_dtype: torch.dtype, embed_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    channels, rows = _CHANNELS, _ROWS
    num_parts = T.dynamic("num_parts")

    @T.prim_func
    def grad_w_reduce(
        grad_w_partial: T.Tensor((num_parts, size), "float32"),
        weight_hidden: T.Tensor((size,), hidden_dtype),
        weight_embed: T.Tensor((size,), embed_dtype),
        grad_weight_hidden: T.Tensor((size,), "float32"),
        grad_weight_embed: T.Tensor((size,), "float32"),
    ) -> None:
        with T.Kernel(size // channels, threads=channels * rows // 4) as block:
            first, last = block * channels, (block + 1) * channels
            parts, row_sums = (T.alloc_fragment((rows, channels), "float32") for _ in range(2))
            sums = T.alloc_fragment((channels,), "float32")
            T.clear(row_sums)
            for i in T.unroll(T.ceildiv(num_parts, rows), unroll_factor=_UNROLL):
                # Beyond the last part come zeros.
                T.copy(grad_w_partial[i * rows : (i + 1) * rows, first:last], parts)
                for p, c in T.Parallel(rows, channels):
                    row_sums[p, c] = row_sums[p, c] + parts[p, c]
            T.reduce_sum(row_sums, sums, dim=0)
            for c in T.Parallel(channels):
                embed = T.cast(weight_embed[first + c], "float32")
                grad_weight_hidden[first + c] = T.fma(sums[c], embed, grad_weight_hidden[first + c])
            for c in T.Parallel(channels):
                hidden = T.cast(weight_hidden[first + c], "float32")
                grad_weight_embed[first + c] = T.fma(sums[c], hidden, grad_weight_embed[first + c])

    return grad_w_reduce


@op
def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """Multiply the weights of the gate's two norms, of the streams and of k: weight_hidden · weight_embed in float32.

    Source: DeepSeek's TileKernels. Each product is rounded once; those of two bfloat16 weights are exact.

    Args:
        weight_hidden: bfloat16 or float32 (m, H), contiguous; m is 1 to 8, H a multiple of 64, up to 16384.
        weight_embed: likewise, of either dtype.

    Returns:
        float32 (m, H).

    Raises:
        TypeError: an argument is not a bfloat16 or float32 tensor.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    shape = check.tensor("weight_hidden", weight_hidden, WEIGHT_DTYPES, ("hc_mult", "hidden"))
    check_sizes("weight_hidden", *shape)
    check.tensor("weight_embed", weight_embed, WEIGHT_DTYPES, tuple(shape), device=weight_hidden.device)
    out = new(weight_hidden.new_empty, shape, dtype=torch.float32)
    if launching(out):
        fuse = _fused_weight_kernel(out.numel(), weight_hidden.dtype, weight_embed.dtype, get_arch(out.device))
        fuse(weight_hidden.view(-1), weight_embed.view(-1), out.view(-1))
    return out


@op(writes=("grad_weight_hidden", "grad_weight_embed"))
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Sum what `engram_gate_bwd` left of the weight's gradient, and add it, times the other weight, to the two given.

    grad_weight_hidden += Σ_b grad_w_partial[b] · weight_embed, and grad_weight_embed likewise with weight_hidden, in
    float32. Source: DeepSeek's TileKernels.

    Args:
        grad_w_partial: float32 (blocks, m, H), contiguous; any number of blocks, none too.
        weight_hidden: bfloat16 or float32 (m, H), contiguous; m is 1 to 8, H a multiple of 64, up to 16384.
        weight_embed: likewise, of either dtype.
        grad_weight_hidden: float32 (m, H), contiguous, added to in place.
        grad_weight_embed: likewise. Both have memory of their own.

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, m or H is out of range, or a gradient shares memory with
            another argument.
    """
    float32 = (torch.float32,)
    num_parts, *shape = check.tensor("grad_w_partial", grad_w_partial, float32, ("blocks", "hc_mult", "hidden"))
    check_sizes("grad_w_partial", *shape)
    device = grad_w_partial.device
    check.tensor("weight_hidden", weight_hidden, WEIGHT_DTYPES, tuple(shape), device=device)
    check.tensor("weight_embed", weight_embed, WEIGHT_DTYPES, tuple(shape), device=device)
    check.tensor("grad_weight_hidden", grad_weight_hidden, float32, tuple(shape), device=device)
    check.tensor("grad_weight_embed", grad_weight_embed, float32, tuple(shape), device=device)
    if launching(grad_weight_hidden, grad_weight_embed) and num_parts:
        size = weight_hidden.numel()
        reduce = _grad_w_reduce_kernel(size, weight_hidden.dtype, weight_embed.dtype, get_arch(device))
        weights = (weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed)
        reduce(grad_w_partial.view(-1, size), *(x.view(-1) for x in weights))
