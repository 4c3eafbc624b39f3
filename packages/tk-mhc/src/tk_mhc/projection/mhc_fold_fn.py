"""mhc_fold_fn: the weight that projects m equal streams, folded into one for a single stream.

    out[j, i] = Σ_s fn[j, s·H + i] · norm_weight[s·H + i]

in float32, from stream 0 upwards, each product and each sum rounded: every bit is defined. After `expand_to_mhc` all
streams are the same, so that the projection before the first sublayer needs a product over H channels, not m·H.

A thread block takes a row and a stretch of the H channels, a thread four neighbouring channels of all streams:

    fn        0   [ thread 0 | thread 1 | … ]      each field 4 channels, one 16-byte load
              1   [ thread 0 | thread 1 | … ]
              …
    out           [ thread 0 | thread 1 | … ]
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, channel_tile
from tk_mhc.lib.tokens import MHC_MULTS, check_hidden

_VECTOR = 4
"""Neighbouring float32 channels of a thread: 16 bytes."""


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_fold_fn_kernel(mhc_mult: int, hidden: int, weighted: bool, arch: Arch) -> Any:
    """`weighted`: there is a norm_weight."""
    import tilelang.language as T

    block_channels = channel_tile(hidden, max_threads=128)
    num_rows = mhc_mult * (mhc_mult + 2)

    @T.prim_func
    def mhc_fold_fn(
        fn: T.Tensor((num_rows, mhc_mult, hidden), "float32"),
        norm_weight: T.Tensor((mhc_mult, hidden), "float32"),
        out: T.Tensor((num_rows, hidden), "float32"),
    ) -> None:
        with T.Kernel(num_rows, T.ceildiv(hidden, block_channels), threads=block_channels // _VECTOR) as (row, block):
            channel = block * block_channels
            streams = T.alloc_fragment((mhc_mult, block_channels), "float32")
            weights = T.alloc_fragment((mhc_mult, block_channels), "float32")
            folded = T.alloc_fragment((block_channels,), "float32")

            T.copy(fn[row, :, channel : channel + block_channels], streams)
            if weighted:
                T.copy(norm_weight[:, channel : channel + block_channels], weights)
                for s, i in T.Parallel(mhc_mult, block_channels):
                    streams[s, i] = streams[s, i] * weights[s, i]
            # Adding to -0 changes nothing; adding to 0 would make a 0 of -0.
            T.fill(folded, -0.0)
            for s in T.unroll(mhc_mult):
                for i in T.Parallel(block_channels):
                    folded[i] = folded[i] + streams[s, i]
            T.copy(folded, out[row, channel : channel + block_channels])

    return mhc_fold_fn


@op
def mhc_fold_fn(fn: Tensor, mhc_mult: int, norm_weight: Tensor | None = None) -> Tensor:
    """Fold the projection of m equal streams into one stream's: Σ_s (fn · norm_weight)[:, s·H : (s+1)·H].

    Source: arXiv 2512.24880. Streams ascending, each product and sum rounded: every bit equals the reference's.

    Args:
        fn: float32 (m·(m+2), m·H), contiguous; H is a multiple of 64, 64 to 8192.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        norm_weight: float32 (m·H), contiguous; None for ones.

    Returns:
        float32 (m·(m+2), H): what `mhc_pre_broadcast` takes.

    Raises:
        TypeError: an argument is not a float32 tensor, or mhc_mult no int.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    check.integer("mhc_mult", mhc_mult)
    check.one_of("mhc_mult", mhc_mult, MHC_MULTS)
    num_rows = mhc_mult * (mhc_mult + 2)
    _, num_channels = check.tensor("fn", fn, (torch.float32,), (num_rows, "mhc_mult * hidden"))
    check.multiple_of("columns of fn", num_channels, mhc_mult)
    hidden = num_channels // mhc_mult
    check_hidden("hidden (columns of fn / mhc_mult)", hidden)
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, (torch.float32,), (num_channels,), device=fn.device)
    out = new(fn.new_empty, (num_rows, hidden))
    if launching(out):
        fold = _mhc_fold_fn_kernel(mhc_mult, hidden, norm_weight is not None, get_arch(fn.device))
        weights = None if norm_weight is None else norm_weight.view(mhc_mult, hidden)
        fold(fn.view(num_rows, mhc_mult, hidden), weights, out)
    return out
