"""expand_to_mhc_bwd: gradient of `expand_to_mhc`, the sum over the streams of each token.

    d_hidden[t, i] = bf16(d_o[t, 0, i] + d_o[t, 1, i] + …)

in float32, from stream 0 upwards, each sum rounded: every bit is defined.

A thread block takes a token and a stretch of its channels, a thread eight neighbouring channels of all streams:

    d_o       0   [ thread 0 | thread 1 | … ]      each field 8 channels, one 16-byte load
              1   [ thread 0 | thread 1 | … ]
              …
    d_hidden      [ thread 0 | thread 1 | … ]
"""

from typing import Any

from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import flat
from tk_mhc.lib.tokens import check_streams


@kernel(pass_configs=DIRECT_COPIES)
def _expand_to_mhc_bwd_kernel(mhc_mult: int, hidden: int, arch: Arch) -> Any:
    import tilelang.language as T

    block_channels = channel_tile(hidden, max_threads=256)
    threads = block_channels // VECTOR
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def expand_to_mhc_bwd(
        d_o: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_hidden: T.Tensor((num_tokens, hidden), "bfloat16"),
    ) -> None:
        with T.Kernel(num_tokens, T.ceildiv(hidden, block_channels), threads=threads) as (token, block):
            channel = block * block_channels
            streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            total = T.alloc_fragment((block_channels,), "float32")

            T.copy(d_o[token, :, channel : channel + block_channels], streams)
            # Adding to -0 changes nothing; adding to 0 would make a 0 of -0.
            T.fill(total, -0.0)
            for s in T.unroll(mhc_mult):
                for i in T.Parallel(block_channels):
                    total[i] = total[i] + T.cast(streams[s, i], "float32")
            T.copy(total, d_hidden[token, channel : channel + block_channels])

    return expand_to_mhc_bwd


@op
def expand_to_mhc_bwd(d_o: Tensor) -> Tensor:
    """Gradient of `expand_to_mhc`: d_hidden = Σ_s d_o[s], in float32, streams ascending, rounded once.

    Source: arXiv 2512.24880. Every bit equals the reference's.

    Args:
        d_o: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.

    Returns:
        bfloat16 (..., H).

    Raises:
        TypeError: d_o is not a bfloat16 tensor.
        ValueError: d_o is not contiguous or has no dimension of streams, or m or H is out of range.
    """
    leading, mhc_mult, hidden, device = check_streams("d_o", d_o)
    d_hidden = new(d_o.new_empty, (*leading, hidden))
    if launching(d_hidden):
        _expand_to_mhc_bwd_kernel(mhc_mult, hidden, get_arch(device))(flat(d_o, 2), flat(d_hidden, 1))
    return d_hidden
