"""mhc_post_bwd: gradients of `mhc_post` by each of its inputs.

    d_x[t, i]           = bf16(Σ_n post[t, n] · d_o[t, n, i])
    d_residual[t, k, i] = bf16(Σ_n comb[t, k, n] · d_o[t, n, i])
    d_post[t, n]        = Σ_i x[t, i] · d_o[t, n, i]
    d_comb[t, k, n]     = Σ_i residual[t, k, i] · d_o[t, n, i]

in float32. Without comb, as with the identity for comb, but there is no d_comb, and residual is not read.

A thread block takes a token and walks its channels, a thread eight neighbouring ones at a time. It reads each channel
once, for all four gradients; of the m + m · m sums over channels each thread keeps partial sums in registers, which are
added up once, at the end:

    channels    [ thread 0 | thread 1 | … ] [ thread 0 | thread 1 | … ] …       each field 8 channels
    sums        (m, threads) and (m, m, threads)  →  d_post (m), d_comb (m, m)
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_core.views import flat
from tk_mhc.lib.tokens import check_post


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_post_bwd_kernel(mhc_mult: int, hidden: int, has_comb: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.stream_steps import mix_of

    # Of 128, 64 and 32 threads the most that leave as few as possible idle in the last round; the sum over the threads
    # of a block needs a power of two, and its order depends on it.
    num_vectors = hidden // VECTOR
    threads = min((128, 64, 32), key=lambda threads: align(num_vectors, threads))
    # Bounds the registers of a thread: with four streams 128 are enough, eight need all that there are.
    min_blocks = 65536 // (threads * (255 if mhc_mult == 8 else 128))
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_post_bwd(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        d_o: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_x: T.Tensor((num_tokens, hidden), "bfloat16"),
        d_residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_post: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        d_comb: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
    ) -> None:
        # Channels of a thread as a dimension of their own: the partial sums are over them alone.
        x_vectors = T.reshape(x, (num_tokens, num_vectors, VECTOR))
        residual_vectors = T.reshape(residual, (num_tokens, mhc_mult, num_vectors, VECTOR))
        d_o_vectors = T.reshape(d_o, (num_tokens, mhc_mult, num_vectors, VECTOR))
        d_x_vectors = T.reshape(d_x, (num_tokens, num_vectors, VECTOR))
        d_residual_vectors = T.reshape(d_residual, (num_tokens, mhc_mult, num_vectors, VECTOR))

        with T.Kernel(num_tokens, threads=threads) as token:
            T.annotate_min_blocks_per_sm(min_blocks)
            post = T.alloc_fragment((mhc_mult,), "float32")
            comb = T.alloc_fragment((mhc_mult, mhc_mult), "float32") if has_comb else None
            layer_output = T.alloc_fragment((threads, VECTOR), "bfloat16")
            streams = T.alloc_fragment((mhc_mult, threads, VECTOR), "bfloat16")
            d_streams = T.alloc_fragment((mhc_mult, threads, VECTOR), "bfloat16")
            total = T.alloc_fragment((threads, VECTOR), "float32")
            post_partial = T.alloc_fragment((mhc_mult, threads), "float32")
            comb_partial = T.alloc_fragment((mhc_mult, mhc_mult, threads), "float32")
            post_sum = T.alloc_fragment((mhc_mult,), "float32")
            comb_sum = T.alloc_fragment((mhc_mult, mhc_mult), "float32")

            T.copy(post_layer_mix[token, :, 0], post)
            if has_comb:
                T.copy(comb_res_mix[token, :, :], comb)
            T.clear(post_partial)
            if has_comb:
                T.clear(comb_partial)
            for chunk in T.serial(T.ceildiv(num_vectors, threads)):
                first = chunk * threads
                T.copy(d_o_vectors[token, :, first : first + threads, :], d_streams)
                T.copy(x_vectors[token, first : first + threads, :], layer_output)
                if has_comb:
                    T.copy(residual_vectors[token, :, first : first + threads, :], streams)
                T.clear(total)
                for n in T.unroll(mhc_mult):
                    for t, v in T.Parallel(threads, VECTOR):
                        total[t, v] = T.fma(post[n], T.cast(d_streams[n, t, v], "float32"), total[t, v])
                T.copy(total, d_x_vectors[token, first : first + threads, :])
                for k in T.unroll(mhc_mult):
                    T.clear(total)
                    for n in T.unroll(mhc_mult):
                        for t, v in T.Parallel(threads, VECTOR):
                            total[t, v] = T.fma(mix_of(comb, k, n), T.cast(d_streams[n, t, v], "float32"), total[t, v])
                    T.copy(total, d_residual_vectors[token, k, first : first + threads, :])
                for n in T.unroll(mhc_mult):
                    for t in T.Parallel(threads):
                        for v in T.unroll(VECTOR):
                            post_partial[n, t] = T.fma(
                                T.float32(layer_output[t, v]), T.float32(d_streams[n, t, v]), post_partial[n, t]
                            )
                    for k in T.unroll(mhc_mult if has_comb else 0):
                        for t in T.Parallel(threads):
                            for v in T.unroll(VECTOR):
                                comb_partial[k, n, t] = T.fma(
                                    T.float32(streams[k, t, v]), T.float32(d_streams[n, t, v]), comb_partial[k, n, t]
                                )
            T.reduce_sum(post_partial, post_sum, dim=1, batch=mhc_mult)
            if has_comb:
                T.reduce_sum(comb_partial, comb_sum, dim=2, batch=mhc_mult * mhc_mult)
            T.copy(post_sum, d_post[token, :, 0])
            if has_comb:
                T.copy(comb_sum, d_comb[token, :, :])

    return mhc_post_bwd


@op
def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor | None,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `mhc_post` by x, residual, post and comb.

    d_x = Σ_n post[n] · d_o[n], d_residual[k] = Σ_n comb[k, n] · d_o[n], d_post[n] = Σ x · d_o[n] and
    d_comb[k, n] = Σ residual[k] · d_o[n], these two over channels; all in float32. Source: arXiv 2512.24880.

    Args:
        x: as `mhc_post` took it: bfloat16 (..., H), contiguous; H is a multiple of 64, 64 to 8192.
        residual: bfloat16 (..., m, H); m is 2, 4 or 8. If it is not contiguous, it is copied first.
        post_layer_mix: float32 (..., m, 1), contiguous.
        comb_res_mix: float32 (..., m, m), contiguous, or None for no mixing.
        d_o: gradient of what `mhc_post` returned, bfloat16 (..., m, H). If it is not contiguous, it is copied first.
        fuse_grad_acc: accepted for TileKernels' callers; changes nothing.

    Returns:
        (d_x, d_residual, d_post, d_comb): bfloat16 (..., H) and (..., m, H), float32 (..., m, 1) and (..., m, m).
        Without comb_res_mix d_comb is None, and the others have the bits of the identity.

    Raises:
        TypeError: an argument is not a tensor of its dtype, or fuse_grad_acc no bool.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    check.flag("fuse_grad_acc", fuse_grad_acc)
    (leading, mhc_mult, hidden, device), arguments = check_post(x, residual, post_layer_mix, comb_res_mix)
    check.tensor("d_o", d_o, (torch.bfloat16,), (*leading, mhc_mult, hidden), layout="any", device=device)
    d_x = new(x.new_empty, (*leading, hidden))
    d_residual = new(x.new_empty, (*leading, mhc_mult, hidden))
    d_post = new(post_layer_mix.new_empty, (*leading, mhc_mult, 1))
    has_comb = comb_res_mix is not None
    d_comb = new(comb_res_mix.new_empty, (*leading, mhc_mult, mhc_mult)) if has_comb else None
    if launching(d_x, d_residual, d_post, d_comb):
        gradients = (flat(d_x, 1), flat(d_residual, 2), flat(d_post, 2), flat(d_comb, 2) if has_comb else None)
        backward = _mhc_post_bwd_kernel(mhc_mult, hidden, has_comb, get_arch(device))
        backward(*arguments, flat(d_o.contiguous(), 2), *gradients)
    return d_x, d_residual, d_post, d_comb
