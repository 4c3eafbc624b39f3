"""What comes before a sublayer, from the projection's sums on: mixes, Sinkhorn, the collapse of streams, a layer norm.

    mixes      = (Σ_s mul[s]) · rsqrt(Σ_s sqrsum[s] / width + rms_eps)
    pre, post, comb = split_mixes(mixes), comb = sinkhorn(comb)
    layer_input = Σ_s pre[s] · residual[s]                                   rounded to bfloat16
    layer_input = layer_input · rsqrt(mean(layer_input²) + eps) · weight     with a layer norm

One launch with two kinds of thread blocks, so that neither waits for the other; without comb there is no Sinkhorn:

    the first thread blocks             post, comb and, if shifted, pre of a few tokens, one a thread
    blocks after these                  the collapse of one token's streams, or of some of its channels
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import new
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import flat
from tk_mhc.lib.pre_arguments import PreArguments, PreOptions
from tk_mhc.lib.tokens import Streams, mix_counts

Collapse = Literal["pre", "pre_mix", "first", "broadcast"]
"""How the streams become the layer's input: weighted by pre; by pre_mix; stream 0; or by pre where all streams are
equal (then they are written, too)."""


@dataclass(frozen=True)
class PreFuseConfig:
    """Launch knobs."""

    threads: int
    block_channels: int
    """Channels of a thread block, which it holds in registers; with a layer norm all of hidden."""
    splits_in_flight: int
    """Splits whose sums are loaded at once."""
    mix_tokens: int
    """Tokens of a thread block that computes post and comb."""

    @staticmethod
    def best(hidden: int, num_partials: int, has_layer_norm: bool) -> "PreFuseConfig":
        """Eight channels a thread. With a layer norm up to 16, and a power of two of threads, for they add up squares.

        Sums of several splits come with few tokens: a thread block then takes few, so that it has little to add up.
        m 4, H 7168, 64 tokens, 56 splits on an H200: 5.2 µs, with 32 splits in flight 6.1, with 224 threads 7.4.
        """
        mixing = (1, 16) if num_partials == 1 else (64, 2)
        if not has_layer_norm:
            threads = max(128, channel_tile(hidden, max_threads=256) // VECTOR) if num_partials == 1 else 128
            return PreFuseConfig(threads, threads * VECTOR, *mixing)
        threads = min(512, max(128, 1 << (ceil_div(hidden, VECTOR) - 1).bit_length()))
        return PreFuseConfig(threads, align(ceil_div(hidden, threads), VECTOR) * threads, *mixing)


@kernel(pass_configs=DIRECT_COPIES)
def pre_fuse_kernel(
    mhc_mult: int,
    hidden: int,
    collapse: Collapse,
    layer_norm: str | None,
    sinkhorn_repeat: int | None,
    has_post_eps: bool,
    config: PreFuseConfig,
    arch: Arch,
) -> Any:
    """`layer_norm`: dtype of the layer norm's weight, or None without one. `sinkhorn_repeat`: None without comb."""
    import tilelang.language as T

    from tk_mhc.lib.mixes import sigmoid, sinkhorn, split_mixes, token_per_thread
    from tk_mhc.lib.partials import sum_partials, threads_per_token
    from tk_mhc.lib.stream_steps import collapse_streams

    has_comb = sinkhorn_repeat is not None
    num_rows = mix_counts(mhc_mult)[0 if has_comb else 1]
    block_channels, mix_tokens, in_flight = config.block_channels, config.mix_tokens, config.splits_in_flight
    num_channel_blocks = ceil_div(hidden, block_channels)
    all_equal = collapse == "broadcast"
    num_stored = 1 if all_equal else mhc_mult
    num_tokens, num_partials = T.dynamic("num_tokens"), T.dynamic("num_partials")

    @T.macro
    def normalize(row: T.Buffer, weight: T.Buffer, eps: Any) -> None:
        rounded = T.alloc_fragment((block_channels,), "bfloat16")
        squares = T.alloc_fragment((block_channels,), "float32")
        square_sum = T.alloc_fragment((1,), "float32")
        T.copy(row, rounded)
        for i in T.Parallel(block_channels):
            value = T.cast(rounded[i], "float32")
            squares[i] = T.if_then_else(i < hidden, value * value, T.float32(0))
        T.reduce_sum(squares, square_sum, dim=0)
        for i in T.Parallel(block_channels):
            if i < hidden:
                rstd = T.rsqrt(square_sum[0] / T.float32(hidden) + eps)
                row[i] = T.cast(rounded[i], "float32") * rstd * T.cast(weight[i], "float32")

    @T.prim_func
    def pre_fuse(
        residual: T.Tensor((num_tokens, num_stored, hidden), "bfloat16"),
        mul: T.Tensor((num_partials, num_tokens, num_rows), "float32"),
        sqrsum: T.Tensor((num_partials, num_tokens), "float32"),
        scale: T.Tensor((3 if has_comb else 2,), "float32"),
        base: T.Tensor((num_rows,), "float32"),
        pre_mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        norm_weight: T.Tensor((hidden,), layer_norm or "float32"),
        next_pre: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        post: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        comb: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        layer_input: T.Tensor((num_tokens, hidden), "bfloat16"),
        expanded: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult_value: T.float32,
        norm_eps: T.float32,
        post_eps: T.float32 if has_post_eps else 0.0,
    ) -> None:
        num_mix_blocks = T.ceildiv(num_tokens, mix_tokens)
        with T.Kernel(num_mix_blocks + num_tokens * num_channel_blocks, threads=config.threads) as block:
            if block < num_mix_blocks:
                first_token = block * mix_tokens
                summed = T.alloc_fragment((mix_tokens, num_rows), "float32")
                rstd = T.alloc_shared((mix_tokens,), "float32")
                mixes = T.alloc_shared((mix_tokens, num_rows), "float32")
                token_mixes = T.alloc_fragment((mix_tokens, num_rows), "float32")
                token_pre = T.alloc_fragment((mix_tokens, mhc_mult), "float32")
                token_post = T.alloc_fragment((mix_tokens, mhc_mult), "float32")
                token_comb = T.alloc_fragment((mix_tokens, mhc_mult, mhc_mult), "float32") if has_comb else None
                weights_of_token = (token_pre, token_post, token_comb)[: 3 if has_comb else 2]
                T.annotate_layout(
                    {x: token_per_thread(x.shape) for x in (token_mixes, *weights_of_token)}
                    | {summed: threads_per_token(mix_tokens, num_rows, 128 // mix_tokens)}
                )

                sum_partials(mul, sqrsum, first_token, num_stored * hidden, rms_eps, summed, rstd, in_flight)
                T.copy(summed, mixes)
                T.copy(mixes, token_mixes)
                numbers = (post_mult_value, pre_eps, post_eps if has_post_eps else None)
                split_mixes(token_mixes, scale, base, token_pre, token_post, token_comb, *numbers)
                if has_comb:
                    sinkhorn(token_comb, sinkhorn_repeat, sinkhorn_eps)
                if collapse in ("pre_mix", "first"):
                    T.copy(token_pre, next_pre[first_token : first_token + mix_tokens, :, 0])
                T.copy(token_post, post[first_token : first_token + mix_tokens, :, 0])
                if has_comb:
                    T.copy(token_comb, comb[first_token : first_token + mix_tokens, :, :])
            else:
                token = (block - num_mix_blocks) // num_channel_blocks
                channel = (block - num_mix_blocks) % num_channel_blocks * block_channels
                streams = T.alloc_fragment((num_stored, block_channels), "bfloat16")
                weights = T.alloc_fragment((1, mhc_mult), "float32")
                shared_weights = T.alloc_shared((mhc_mult,), "float32")
                token_rstd = T.alloc_shared((1,), "float32")
                collapsed = T.alloc_fragment((block_channels,), "float32")

                # Loaded first: the streams are in flight while the weights are computed.
                T.copy(residual[token, :, channel : channel + block_channels], streams)
                if collapse in ("pre", "broadcast"):
                    sum_partials(mul, sqrsum, token, num_stored * hidden, rms_eps, weights, token_rstd, in_flight)
                    for t, s in T.Parallel(1, mhc_mult):
                        shared_weights[s] = sigmoid(weights[t, s] * scale[0] + base[s]) + pre_eps
                elif collapse == "pre_mix":
                    T.copy(pre_mix[token, :, 0], shared_weights)
                if collapse == "first":
                    for i in T.Parallel(block_channels):
                        collapsed[i] = T.cast(streams[0, i], "float32")
                else:
                    collapse_streams(streams, shared_weights, collapsed)
                if all_equal:
                    for s in T.unroll(mhc_mult):
                        for i in T.Parallel(block_channels):
                            if channel + i < hidden:
                                expanded[token, s, channel + i] = streams[0, i]
                if layer_norm is not None:
                    normalize(collapsed, norm_weight, norm_eps)
                T.copy(collapsed, layer_input[token, channel : channel + block_channels])

    return pre_fuse


class PreResults(NamedTuple):
    """What all ops with this kernel return."""

    post: Tensor
    comb: Tensor | None
    layer_input: Tensor
    next_pre_mix: Tensor | None

    def present(self) -> tuple[Tensor | None, ...]:
        """Without next_pre_mix if it is None."""
        return tuple(self) if self.next_pre_mix is not None else self[:3]


def new_results(like: Tensor, streams: Streams, has_comb: bool, shifted: bool) -> PreResults:
    """Tensors for the results, next_pre_mix only if shifted, on the device of the bfloat16 tensor `like`."""
    leading, mhc_mult, hidden, _ = streams
    post = new(like.new_empty, (*leading, mhc_mult, 1), dtype=torch.float32)
    comb = new(like.new_empty, (*leading, mhc_mult, mhc_mult), dtype=torch.float32) if has_comb else None
    layer_input = new(like.new_empty, (*leading, hidden))
    next_pre_mix = new(like.new_empty, (*leading, mhc_mult, 1), dtype=torch.float32) if shifted else None
    return PreResults(post, comb, layer_input, next_pre_mix)


def launch_pre_fuse(
    residual: Tensor,
    sums: tuple[Tensor, Tensor],
    arguments: PreArguments,
    options: PreOptions,
    results: PreResults,
    expanded: Tensor | None = None,
) -> None:
    """Launch on the projection's sums, (P, T, mixes) and (P, T), and write `results`.

    residual is (T, m, H). With `expanded` (T, m, H), which is written, it is (T, 1, H): the one that all streams equal.
    """
    scale, base, *numbers, sinkhorn_repeat, post_eps = arguments
    weight, norm_eps, shifted, pre_mix = options
    collapse = "pre" if expanded is None else "broadcast"
    if shifted:
        collapse = "first" if pre_mix is None else "pre_mix"
    mhc_mult, hidden = results.post.shape[-2], residual.shape[2]
    layer_norm = None if weight is None else str(weight.dtype).removeprefix("torch.")
    arch = get_arch(residual.device)
    config = PreFuseConfig.best(hidden, sums[0].shape[0], weight is not None)
    fuse = pre_fuse_kernel(mhc_mult, hidden, collapse, layer_norm, sinkhorn_repeat, post_eps != 0, config, arch)
    post, comb, layer_input, next_pre_mix = results
    next_pre_mix, comb = (None if x is None else flat(x, 2) for x in (next_pre_mix, comb))
    outputs = (next_pre_mix, flat(post, 2), comb, flat(layer_input, 1), expanded)
    numbers += [norm_eps, post_eps] if post_eps != 0 else [norm_eps]
    fuse(residual, *sums, scale, base, pre_mix, weight, *outputs, *numbers)
