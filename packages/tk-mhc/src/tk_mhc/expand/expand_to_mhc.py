"""expand_to_mhc: each token's hidden state becomes its m streams, the first residual of a model.

    out[t, s, i] = hidden[t, i]

A thread block takes a token, a thread eight neighbouring channels of each half: two 16-byte loads, 2m 16-byte stores.

    hidden        [ thread 0 | thread 1 | …  ║  thread 0 | thread 1 | … ]
    out       0   [ thread 0 | thread 1 | …  ║  thread 0 | thread 1 | … ]
              1   [ thread 0 | thread 1 | …  ║  thread 0 | thread 1 | … ]
              …
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import given_or_new, launching, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_core.views import flat
from tk_mhc.lib.tokens import MHC_MULTS, check_hidden


@kernel(pass_configs=DIRECT_COPIES)
def _expand_to_mhc_kernel(mhc_mult: int, hidden_size: int, arch: Arch) -> Any:
    import tilelang.language as T

    # 16 channels a thread: two 16-byte loads in flight. m 4, H 7168, 8192 tokens on an H200: 148 µs, with eight
    # channels a thread 154; the writes alone take 139.
    threads = align(ceil_div(hidden_size, 2 * VECTOR), 32)
    block_channels = 2 * VECTOR * threads
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def expand_to_mhc(
        hidden: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        out: T.Tensor((num_tokens, mhc_mult, hidden_size), "bfloat16"),
    ) -> None:
        with T.Kernel(num_tokens, T.ceildiv(hidden_size, block_channels), threads=threads) as (token, block):
            channel = block * block_channels
            stream = T.alloc_fragment((block_channels,), "bfloat16")

            T.copy(hidden[token, channel : channel + block_channels], stream)
            for s in T.unroll(mhc_mult):
                T.copy(stream, out[token, s, channel : channel + block_channels])

    return expand_to_mhc


@op(writes=("out",))
def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Copy each token's hidden state into its streams: out[s] = hidden.

    Source: arXiv 2512.24880.

    Args:
        hidden: bfloat16 (..., H), contiguous; H is a multiple of 64, 64 to 8192.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        out: bfloat16 (..., m, H), contiguous, to be written, of no other argument's memory; None for a new tensor.

    Returns:
        bfloat16 (..., m, H): `out`, if it was given.

    Raises:
        TypeError: an argument is not a tensor of its dtype, or mhc_mult no int.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    *leading, hidden_size = check.tensor("hidden", hidden, (torch.bfloat16,), (..., "hidden_size"))
    check_hidden("hidden_size (last dimension of hidden)", hidden_size)
    check.integer("mhc_mult", mhc_mult)
    check.one_of("mhc_mult", mhc_mult, MHC_MULTS)
    out = given_or_new("out", out, hidden, (*leading, mhc_mult, hidden_size))
    if launching(out):
        _expand_to_mhc_kernel(mhc_mult, hidden_size, get_arch(hidden.device))(flat(hidden, 1), flat(out, 2))
    return out
