"""mhc_pre_apply_mix: the m streams of each token collapse into one, the input of a sublayer.

    out[t, i] = bf16(Σ_s mix[t, s] · x[t, s, i])

in float32, one fused multiply-add a stream, streams ascending from 0, rounded once: every bit is defined.

A thread block takes a token and a stretch of its channels, a thread eight neighbouring channels of all streams:

    streams   0   [ thread 0 | thread 1 | … ]      each field 8 channels, one 16-byte load
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
from tk_core.op import given_or_new, launching, op
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import flat
from tk_mhc.lib.tokens import check_streams


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_pre_apply_mix_kernel(mhc_mult: int, hidden: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.stream_steps import collapse_streams

    block_channels = channel_tile(hidden, max_threads=256)
    threads = block_channels // VECTOR
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_pre_apply_mix(
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        out: T.Tensor((num_tokens, hidden), "bfloat16"),
    ) -> None:
        with T.Kernel(num_tokens, T.ceildiv(hidden, block_channels), threads=threads) as (token, block):
            channel = block * block_channels
            streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            collapsed = T.alloc_fragment((block_channels,), "float32")
            weights = T.alloc_fragment((mhc_mult,), "float32")

            T.copy(x[token, :, channel : channel + block_channels], streams)
            T.copy(mix[token, :, 0], weights)
            collapse_streams(streams, weights, collapsed)
            T.copy(collapsed, out[token, channel : channel + block_channels])

    return mhc_pre_apply_mix


@op(writes=("out",))
def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Collapse the streams of each token: out = Σ_s mix[s] · x[s], in float32, streams ascending, rounded once.

    Source: arXiv 2512.24880. Every bit equals the reference's: each term is one fused multiply-add.

    Args:
        x: the residual, bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        mix: float32 (..., m, 1), contiguous.
        out: bfloat16 (..., H), contiguous, to be written, of no other argument's memory; None for a new tensor.

    Returns:
        bfloat16 (..., H): `out`, if it was given.

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    leading, mhc_mult, hidden, device = check_streams("x", x)
    check.tensor("mix", mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
    out = given_or_new("out", out, x, (*leading, hidden))
    if launching(out):
        _mhc_pre_apply_mix_kernel(mhc_mult, hidden, get_arch(device))(flat(x, 2), flat(mix, 2), flat(out, 1))
    return out
