"""mhc_pre_apply_mix_bwd: gradients of `mhc_pre_apply_mix` by the streams and by their weights.

    d_x[t, s, i] = bf16(mix[t, s] · d_o[t, i]  [+ d_x[t, s, i], if it was given])
    d_mix[t, s]  = Σ_i d_o[t, i] · x[t, s, i]

in float32; of d_x the product and the sum are each rounded, so every bit of it is defined.

A thread block takes a token and walks over its channels in tiles, a thread eight neighbouring channels of all streams:

    tile            0                            1                            …
    d_o             [ thread 0 | thread 1 | … ]  [ thread 0 | thread 1 | … ]
    x, d_x    0     [ thread 0 | thread 1 | … ]  [ thread 0 | thread 1 | … ]
              1     [ thread 0 | thread 1 | … ]  …
              …
    d_mix           in registers: a sum for each stream and each channel of a tile, added up after the last tile

The order of the sums depends on hidden alone.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_core.op import given_or_new, launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_core.views import flat
from tk_mhc.lib.tokens import check_streams


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_pre_apply_mix_bwd_kernel(mhc_mult: int, hidden: int, accumulate: bool, arch: Arch) -> Any:
    """`accumulate`: d_x is read and added to."""
    import tilelang.language as T

    # The fewest idle threads in the last tile; of equals the most threads, a power of two, which T.reduce_sum wants.
    # No more than 128: with 93 registers a thread for four streams five such blocks share an SM, of 256 threads two.
    threads = min((128, 64, 32), key=lambda threads: align(hidden, VECTOR * threads))
    block_channels = VECTOR * threads
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_pre_apply_mix_bwd(
        d_o: T.Tensor((num_tokens, hidden), "bfloat16"),
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        d_x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
    ) -> None:
        with T.Kernel(num_tokens, threads=threads) as token:
            grad = T.alloc_fragment((block_channels,), "bfloat16")
            streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            grads = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            weights = T.alloc_fragment((mhc_mult,), "float32")
            products = T.alloc_fragment((mhc_mult, block_channels), "float32")
            sums = T.alloc_fragment((mhc_mult,), "float32")

            T.copy(mix[token, :, 0], weights)
            T.clear(products)
            for tile in T.serial(T.ceildiv(hidden, block_channels)):
                channel = tile * block_channels
                T.copy(d_o[token, channel : channel + block_channels], grad)
                T.copy(x[token, :, channel : channel + block_channels], streams)
                if accumulate:
                    T.copy(d_x[token, :, channel : channel + block_channels], grads)
                for s, i in T.Parallel(mhc_mult, block_channels):
                    products[s, i] = T.fma(T.cast(grad[i], "float32"), T.cast(streams[s, i], "float32"), products[s, i])
                    if accumulate:
                        grads[s, i] = weights[s] * T.cast(grad[i], "float32") + T.cast(grads[s, i], "float32")
                    else:
                        grads[s, i] = weights[s] * T.cast(grad[i], "float32")
                T.copy(grads, d_x[token, :, channel : channel + block_channels])
            T.reduce_sum(products, sums, dim=1, batch=mhc_mult)
            T.copy(sums, d_mix[token, :, 0])

    return mhc_pre_apply_mix_bwd


@op(writes=("d_x",))
def mhc_pre_apply_mix_bwd(d_o: Tensor, x: Tensor, mix: Tensor, *, d_x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of `mhc_pre_apply_mix`: d_x[s] = mix[s] · d_o (+ the given d_x), d_mix[s] = Σ_i d_o[i] · x[s, i].

    Source: arXiv 2512.24880. All in float32. d_x is rounded once and exact; d_mix is within 1e-4 of the reference's,
    which adds in another order.

    Args:
        d_o: the gradient of the output, bfloat16 (..., H), contiguous.
        x: the residual, bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        mix: float32 (..., m, 1), contiguous.
        d_x: bfloat16 (..., m, H), contiguous, a gradient that is added to in place, of no other argument's memory; None
            for a new tensor.

    Returns:
        (d_x, d_mix): bfloat16 (..., m, H), `d_x` itself if it was given, and float32 (..., m, 1).

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    leading, mhc_mult, hidden, device = check_streams("x", x)
    check.tensor("d_o", d_o, (torch.bfloat16,), (*leading, hidden), device=device)
    check.tensor("mix", mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
    accumulate = d_x is not None
    d_x = given_or_new("d_x", d_x, x, x.shape)
    d_mix = new(mix.new_empty, mix.shape)
    if launching(d_x, d_mix):
        backward = _mhc_pre_apply_mix_bwd_kernel(mhc_mult, hidden, accumulate, get_arch(device))
        backward(flat(d_o, 1), flat(x, 2), flat(mix, 2), flat(d_x, 2), flat(d_mix, 2))
    return d_x, d_mix
