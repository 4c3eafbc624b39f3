"""The gate's backward in two kernels, for shapes whose sums over tokens do not fit a thread block's registers.

1. `score_gradients`, a thread block for each token: Σ_i grad_out · v of each stream, and grad_v.
2. `channel_gradients`, a thread block for a range of tokens and some channels of a stream: all else.

Formulas and arguments are those of `engram_gate_bwd`; only grad_out is read twice.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.sizes import num_token_ranges

_THREADS = 128
"""A power of two, as T.reduce_sum over all threads of a block wants."""
_TILE = VECTOR * _THREADS
"""Channels at a time; those beyond hidden are left out."""


@kernel(pass_configs=DIRECT_COPIES)
def score_gradients_kernel(mhc_mult: int, hidden: int, has_mask: bool, packed: bool, arch: Arch) -> Any:
    """`packed`: grad_k is (T, m + 1, H), and the last row of each token is grad_v."""
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import channels_of_threads

    num_tokens, v_stride = T.dynamic("num_tokens"), T.dynamic("v_stride", "int64")

    @T.prim_func
    def score_gradients(
        grad_out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        v: T.StridedTensor((num_tokens, hidden), (v_stride, 1), "bfloat16"),
        gate_score: T.Tensor((num_tokens, mhc_mult), "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        grad_k: T.Tensor((num_tokens, mhc_mult + packed, hidden), "bfloat16"),
        grad_v: T.Tensor((num_tokens, hidden), "bfloat16"),
        score_grads: T.Tensor((num_tokens, mhc_mult), "float32"),
    ) -> None:
        with T.Kernel(num_tokens, threads=_THREADS) as token:
            T.assume(v_stride % VECTOR == 0)
            grads = T.alloc_fragment((mhc_mult, _TILE), "bfloat16")
            vs = T.alloc_fragment((_TILE,), "bfloat16")
            v_grads = T.alloc_fragment((_TILE,), "float32")
            rounded = T.alloc_fragment((_TILE,), "bfloat16")
            parts = T.alloc_fragment((mhc_mult, _THREADS), "float32")
            sums = T.alloc_fragment((mhc_mult,), "float32")
            T.annotate_layout({each: channels_of_threads(each.shape) for each in (grads, vs, v_grads, rounded)})
            T.clear(parts)
            for block in T.serial(ceil_div(hidden, _TILE)):
                first, last = block * _TILE, (block + 1) * _TILE
                T.copy(grad_out[token, :, first:last], grads)
                T.copy(v[token, first:last], vs)
                T.clear(v_grads)
                for s in T.unroll(mhc_mult):
                    for t in T.Parallel(_THREADS):
                        for j in T.unroll(VECTOR):
                            c = t * VECTOR + j
                            parts[s, t] = T.fma(T.cast(grads[s, c], "float32"), T.cast(vs[c], "float32"), parts[s, t])
                    for i in T.Parallel(_TILE):
                        v_grads[i] = T.fma(gate_score[token, s], T.cast(grads[s, i], "float32"), v_grads[i])
                for i in T.Parallel(_TILE):
                    rounded[i] = (
                        T.if_then_else(image_token_mask[token], T.float32(0), v_grads[i]) if has_mask else v_grads[i]
                    )
                if packed:
                    T.copy(rounded, grad_k[token, mhc_mult, first:last])
                else:
                    T.copy(rounded, grad_v[token, first:last])
            T.reduce_sum(parts, sums, dim=1, batch=mhc_mult)
            T.copy(sums, score_grads[token, :])

    return score_gradients


@kernel(pass_configs=DIRECT_COPIES)
def channel_gradients_kernel(
    mhc_mult: int, hidden: int, add_residual: bool, has_mask: bool, packed: bool, arch: Arch
) -> Any:
    """`packed`: grad_k is (T, m + 1, H)."""
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import Gradients, Inputs, Saved, channels_of_threads, gate_factors, stream_gradients

    num_ranges, num_blocks = num_token_ranges(mhc_mult, hidden), ceil_div(hidden, _TILE)
    num_tokens = T.dynamic("num_tokens")
    k_token_stride, k_stream_stride = T.dynamic("k_token_stride", "int64"), T.dynamic("k_stream_stride", "int64")
    saved_shape = (num_tokens, mhc_mult)

    @T.prim_func
    def channel_gradients(
        grad_out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        k: T.StridedTensor((num_tokens, mhc_mult, hidden), (k_token_stride, k_stream_stride, 1), "bfloat16"),
        weight: T.Tensor((mhc_mult, hidden), "float32"),
        dot: T.Tensor(saved_shape, "float32"),
        gate_score: T.Tensor(saved_shape, "float32"),
        rstd_x: T.Tensor(saved_shape, "float32"),
        rstd_k: T.Tensor(saved_shape, "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        score_grads: T.Tensor(saved_shape, "float32"),
        grad_x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        grad_k: T.Tensor((num_tokens, mhc_mult + packed, hidden), "bfloat16"),
        grad_w_partial: T.Tensor((num_ranges, mhc_mult, hidden), "float32"),
        clamp_value: T.float32,
    ) -> None:
        with T.Kernel(mhc_mult * num_blocks, num_ranges, threads=_THREADS) as (block, token_range):
            T.assume(k_token_stride % VECTOR == 0)
            T.assume(k_stream_stride % VECTOR == 0)
            s, first = block // num_blocks, block % num_blocks * _TILE
            grads, xs, ks = (T.alloc_fragment((_TILE,), "bfloat16") for _ in range(3))
            ws = T.alloc_fragment((_TILE,), "float32")
            x_grads, k_grads = (T.alloc_fragment((_TILE,), "bfloat16") for _ in range(2))
            w_grads = T.alloc_fragment((1, 1, _TILE), "float32")
            factors = T.alloc_local((4,), "float32")
            tiles = (grads, xs, ks, ws, x_grads, k_grads, w_grads)
            T.annotate_layout({each: channels_of_threads(each.shape) for each in tiles})
            T.copy(weight[s, first : first + _TILE], ws)
            T.clear(w_grads)
            for n in T.serial(T.ceildiv(num_tokens - token_range, num_ranges)):
                token = token_range + n * num_ranges
                is_image = image_token_mask[token] if has_mask else None
                T.copy(grad_out[token, s, first : first + _TILE], grads)
                T.copy(x[token, s, first : first + _TILE], xs)
                T.copy(k[token, s, first : first + _TILE], ks)
                saved = Saved(dot[token, s], gate_score[token, s], rstd_x[token, s], rstd_k[token, s])
                gate_factors(score_grads[token, s], saved, clamp_value, hidden, factors)
                inputs, gradients = Inputs(grads, xs, ks, ws), Gradients(x_grads, k_grads, w_grads)
                stream_gradients(inputs, factors, is_image, add_residual, gradients, 0, 0)
                T.copy(x_grads, grad_x[token, s, first : first + _TILE])
                T.copy(k_grads, grad_k[token, s, first : first + _TILE])
            T.copy(w_grads[0, 0, :], grad_w_partial[token_range, s, first : first + _TILE])

    return channel_gradients
