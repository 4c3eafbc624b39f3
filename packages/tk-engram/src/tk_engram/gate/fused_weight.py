"""fused_weight: the product of the gate's two norm weights, which is all that its kernels need of them.

    out = float32(weight_hidden) · float32(weight_embed)

Source: DeepSeek's Engram and its TileKernels. A thread takes eight neighbouring channels.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_core.views import aligned
from tk_engram.lib.gate import check_sizes
from tk_engram.sizes import WEIGHT_DTYPES

_THREADS = 128


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


@op("tk_engram::fused_weight_out", mutates=("out",), reference="fused_weight")
def _fused_weight_out(weight_hidden: Tensor, weight_embed: Tensor, out: Tensor) -> None:
    fuse = _fused_weight_kernel(out.numel(), weight_hidden.dtype, weight_embed.dtype, get_arch(out.device))
    fuse(aligned(weight_hidden).view(-1), aligned(weight_embed).view(-1), out.view(-1))


@replayable
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
    out = weight_hidden.new_empty(shape, dtype=torch.float32)
    _fused_weight_out(weight_hidden, weight_embed, out)
    return out
