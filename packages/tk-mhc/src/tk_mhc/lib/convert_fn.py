"""The projection's weights, converted once for all thread blocks: fn · norm_weight, each as high + low, two bfloat16.

A thread block takes a row and a stretch of its channels, a thread eight neighbouring ones.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.tiles import DIRECT_COPIES, channel_tile


@kernel(pass_configs=DIRECT_COPIES)
def _convert_kernel(num_rows: int, width: int, is_normed: bool, arch: Arch) -> Any:
    import tilelang.language as T

    block_channels = channel_tile(width, max_threads=128)

    @T.prim_func
    def convert(
        fn: T.Tensor((num_rows, width), "float32"),
        norm_weight: T.Tensor((width,), "float32"),
        parts: T.Tensor((2, num_rows, width), "bfloat16"),
    ) -> None:
        with T.Kernel(T.ceildiv(width, block_channels), num_rows, threads=block_channels // 8) as (block, row):
            channel = block * block_channels
            weights = T.alloc_fragment((block_channels,), "float32")
            factors = T.alloc_fragment((block_channels,), "float32")
            high = T.alloc_fragment((block_channels,), "bfloat16")
            low = T.alloc_fragment((block_channels,), "bfloat16")
            T.copy(fn[row, channel : channel + block_channels], weights)
            if is_normed:
                T.copy(norm_weight[channel : channel + block_channels], factors)
                for i in T.Parallel(block_channels):
                    weights[i] = weights[i] * factors[i]
            for i in T.Parallel(block_channels):
                high[i] = T.cast(weights[i], "bfloat16")
            for i in T.Parallel(block_channels):
                low[i] = T.cast(weights[i] - T.cast(high[i], "float32"), "bfloat16")
            T.copy(high, parts[0, row, channel : channel + block_channels])
            T.copy(low, parts[1, row, channel : channel + block_channels])

    return convert


def convert_fn(fn: Tensor, norm_weight: Tensor | None) -> Tensor:
    """fn (rows, width), times norm_weight (width,) if it is given, as bfloat16 (2, rows, width): high and low parts."""
    parts = fn.new_empty((2, *fn.shape), dtype=torch.bfloat16)
    _convert_kernel(*fn.shape, norm_weight is not None, get_arch(fn.device))(fn, norm_weight, parts)
    return parts
