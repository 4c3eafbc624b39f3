"""mhc_post: the m streams of each token mixed among themselves, with the output of a sublayer added to each.

    out[t, n, i] = bf16(post[t, n] · x[t, i] + Σ_k comb[t, k, n] · residual[t, k, i])

in float32: the product with x rounded, then one fused multiply-add a stream, ascending, then rounded to bfloat16: every
bit is defined. Without comb streams are not mixed: the same with the identity for comb.

A thread block takes a token and a stretch of its channels, a thread eight neighbouring channels of x and of all
streams, with all mixes of the token in registers:

    x               [ thread 0 | thread 1 | … ]      each field 8 channels, one 16-byte load
    residual    0   [ thread 0 | thread 1 | … ]
                …
    out         0   [ thread 0 | thread 1 | … ]
                …
"""

from typing import Any

from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import given_or_new, launching, op
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import flat
from tk_mhc.lib.tokens import PostArguments, check_post


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_post_kernel(mhc_mult: int, hidden: int, has_comb: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.stream_steps import post_streams

    # With eight streams a thread needs 163 registers, and smaller blocks leave fewer of an SM's registers unused.
    block_channels = channel_tile(hidden, max_threads=128 if mhc_mult == 8 else 256)
    threads = block_channels // VECTOR
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_post(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
    ) -> None:
        with T.Kernel(num_tokens, T.ceildiv(hidden, block_channels), threads=threads) as (token, block):
            channel = block * block_channels
            layer_output = T.alloc_fragment((block_channels,), "bfloat16")
            streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            new_streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            post = T.alloc_fragment((mhc_mult,), "float32")
            comb = T.alloc_fragment((mhc_mult, mhc_mult), "float32") if has_comb else None

            T.copy(x[token, channel : channel + block_channels], layer_output)
            T.copy(residual[token, :, channel : channel + block_channels], streams)
            T.copy(post_layer_mix[token, :, 0], post)
            if has_comb:
                T.copy(comb_res_mix[token, :, :], comb)
            post_streams(layer_output, streams, post, comb, new_streams)
            T.copy(new_streams, out[token, :, channel : channel + block_channels])

    return mhc_post


def launch_post(arguments: PostArguments, out: Tensor) -> None:
    """Launch on at least one token, and write out (T, m, H)."""
    _, mhc_mult, hidden = out.shape
    has_comb = arguments.comb_res_mix is not None
    _mhc_post_kernel(mhc_mult, hidden, has_comb, get_arch(out.device))(*arguments, out)


@op(writes=("out",))
def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Mix the streams and add a sublayer's output to each: out[n] = post[n] · x + Σ_k comb[k, n] · residual[k].

    In float32, the product with x rounded, then one fused multiply-add a stream, ascending, then rounded to bfloat16.
    Source: arXiv 2512.24880.

    Args:
        x: output of the sublayer, bfloat16 (..., H), contiguous; H is a multiple of 64, 64 to 8192.
        residual: the streams, bfloat16 (..., m, H); m is 2, 4 or 8. If it is not contiguous, it is copied first.
        post_layer_mix: post, float32 (..., m, 1), contiguous.
        comb_res_mix: comb, float32 (..., m, m), contiguous; None has the bits of the identity.
        out: bfloat16 (..., m, H), contiguous, to be written, of no other argument's memory; None for a new tensor.

    Returns:
        bfloat16 (..., m, H): `out`, if it was given.

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    (leading, mhc_mult, hidden, _), arguments = check_post(x, residual, post_layer_mix, comb_res_mix)
    out = given_or_new("out", out, x, (*leading, mhc_mult, hidden))
    if launching(out):
        launch_post(arguments, flat(out, 2))
    return out
