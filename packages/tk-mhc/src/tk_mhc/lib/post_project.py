"""mhc_post and the projection of what it returns in one kernel, for few tokens on Hopper.

    new[t, n, i]  = bf16(post[t, n] · x[t, i] + Σ_k comb[t, k, n] · residual[t, k, i])
    mul[s, t, j]  = Σ_c new[t, c] · F[j, c]        F = fn · norm_weight, c in split s, streams side by side
    sqrsum[s, t]  = Σ_c new[t, c]²

with the bits of mhc_post and of lib/project_wgmma.py: the same macros, steps and tensor core instructions.

Every 64 tokens have as many thread blocks as there are splits, in all no more than there are SMs: they run at the same
time and can wait for each other. A thread block first computes all streams of some channels and converts the weights of
its split; when all have done so, it multiplies streams that others have written.

    x, residual   tokens × 64 channels of all streams ──→ new_residual
    fn            rows × the split's channels, float32 ──→ high and low parts, bfloat16 ──────┐
    ───────────── all thread blocks wait for each other ──────────────────────────────────────┤
    new_residual  tokens × the split's channels ──→ squares, tensor cores: tokens × rows ←────┘
"""

from typing import Any

from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.tiles import DIRECT_COPIES
from tk_mhc.lib.projection import default_n_splits, new_sums
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, Projection, ProjectionConfig, padded_rows
from tk_mhc.lib.tokens import PostArguments, mix_counts

_BLOCK_TOKENS = ProjectionConfig.block_tokens

_THREADS = 256
"""mhc_post_pre, H 7168, on an H200, 1, 64 and 128 tokens: 11.6, 14.9 and 18.6 µs; with 512 13.1, 16.2 and 19.8."""


@kernel(pass_configs=DIRECT_COPIES)
def post_project_kernel(
    mhc_mult: int, hidden: int, has_comb: bool, n_splits: int, is_normed: bool, block_channels: int, arch: Arch
) -> Any:
    """`block_channels`: channels of a step of the projection, on which its bits depend."""
    import tilelang.language as T

    from tk_mhc.lib.projection_tiles import SplitSteps, add_squares, convert_weights, write_squares, write_sums
    from tk_mhc.lib.stream_steps import post_stream_of_tokens

    num_rows, width = mix_counts(mhc_mult)[0 if has_comb else 1], mhc_mult * hidden
    steps = SplitSteps(n_splits, width // CHANNEL_BLOCK, block_channels // CHANNEL_BLOCK)
    # A tuple, for loops that Python unrolls: each step of a split has tiles of its own.
    split_steps = tuple(range(max(steps.first(split + 1) - steps.first(split) for split in range(n_splits))))
    num_blocks = hidden // CHANNEL_BLOCK
    post_blocks = tuple(range(ceil_div(num_blocks, n_splits)))
    # Two warp groups share a product's columns, at least eight each; the bits are those of fewer columns.
    product_rows = max(16, padded_rows(num_rows))
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def post_project(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        fn: T.Tensor((num_rows, width), "float32"),
        norm_weight: T.Tensor((width,), "float32"),
        new_residual: T.Tensor((num_tokens, width), "bfloat16"),
        mul: T.Tensor((n_splits, num_tokens, num_rows), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), n_splits, threads=_THREADS) as (tile, split):
            layer_outputs = [T.alloc_fragment((_BLOCK_TOKENS, CHANNEL_BLOCK), "bfloat16") for _ in post_blocks]
            streams = [T.alloc_fragment((mhc_mult, _BLOCK_TOKENS, CHANNEL_BLOCK), "bfloat16") for _ in post_blocks]
            new_stream = T.alloc_fragment((_BLOCK_TOKENS, CHANNEL_BLOCK), "bfloat16")
            post = T.alloc_shared((_BLOCK_TOKENS, mhc_mult), "float32")
            comb = T.alloc_shared((_BLOCK_TOKENS, mhc_mult, mhc_mult), "float32") if has_comb else None
            fn_tiles = [T.alloc_fragment((num_rows, block_channels), "float32") for _ in split_steps]
            weights = [T.alloc_shared((block_channels,), "float32") for _ in split_steps]
            parts = [T.alloc_shared((2, product_rows, block_channels), "bfloat16") for _ in split_steps]
            new_tiles = [T.alloc_shared((_BLOCK_TOKENS, block_channels), "bfloat16") for _ in split_steps]
            product = T.alloc_fragment((_BLOCK_TOKENS, product_rows), "float32")
            squares = T.alloc_fragment((_BLOCK_TOKENS, CHANNEL_BLOCK), "float32")
            square_sum = T.alloc_fragment((_BLOCK_TOKENS,), "float32")

            first_token, end_token = tile * _BLOCK_TOKENS, (tile + 1) * _BLOCK_TOKENS
            first_channel = steps.first(split) * block_channels
            num_steps = steps.first(split + 1) - steps.first(split)
            first_block = split * num_blocks // n_splits
            num_post_blocks = (split + 1) * num_blocks // n_splits - first_block

            # All loads come first, so that they are in flight together.
            T.copy(post_layer_mix[first_token:end_token, :, 0], post)
            if has_comb:
                T.copy(comb_res_mix[first_token:end_token, :, :], comb)
            for b in post_blocks:
                if b < num_post_blocks:
                    channel = (first_block + b) * CHANNEL_BLOCK
                    T.copy(x[first_token:end_token, channel : channel + CHANNEL_BLOCK], layer_outputs[b])
                    for k in T.unroll(mhc_mult):
                        T.copy(
                            residual[first_token:end_token, k, channel : channel + CHANNEL_BLOCK], streams[b][k, :, :]
                        )
            for step in split_steps:
                if step < num_steps:
                    channel = first_channel + step * block_channels
                    T.copy(fn[:, channel : channel + block_channels], fn_tiles[step])
                    if is_normed:
                        T.copy(norm_weight[channel : channel + block_channels], weights[step])

            for b in post_blocks:
                if b < num_post_blocks:
                    for n in T.unroll(mhc_mult):
                        channel = n * hidden + (first_block + b) * CHANNEL_BLOCK
                        post_stream_of_tokens(layer_outputs[b], streams[b], post, comb, n, new_stream)
                        T.copy(new_stream, new_residual[first_token:end_token, channel : channel + CHANNEL_BLOCK])
            for step in split_steps:
                if step < num_steps:
                    convert_weights(fn_tiles[step], weights[step] if is_normed else None, parts[step])

            T.sync_grid()
            for step in split_steps:
                if step < num_steps:
                    channel = first_channel + step * block_channels
                    T.copy(new_residual[first_token:end_token, channel : channel + block_channels], new_tiles[step])
            T.clear(product)
            T.clear(squares)
            for step in split_steps:
                if step < num_steps:
                    T.wgmma_gemm(new_tiles[step], parts[step][0, :, :], product, transpose_B=True)
                    T.wgmma_gemm(new_tiles[step], parts[step][1, :, :], product, transpose_B=True)
                    add_squares(new_tiles[step], squares)
            T.wait_wgmma(0)
            T.reduce_sum(squares, square_sum, dim=1)
            write_squares(square_sum, sqrsum, split, first_token, 0, 1)
            write_sums(product, mul, split, first_token, 0, num_rows)

    return post_project


def takes_post_project(new_residual: Tensor, n_splits: int) -> bool:
    """Whether this kernel can do it: Hopper, m 4, splits no longer than by default, and an SM for each thread block."""
    num_tokens, mhc_mult, hidden = new_residual.shape
    if not get_arch(new_residual.device).has_wgmma or mhc_mult != 4 or n_splits < default_n_splits(mhc_mult * hidden):
        return False
    return n_splits * ceil_div(num_tokens, _BLOCK_TOKENS) <= get_num_sms(new_residual.device)


def launch_post_sums(arguments: PostArguments, projection: Projection, new_residual: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the kernel, which writes new_residual (T, m, H).

    Returns the sums of its splits, mul (n_splits, T, rows of fn) and sqrsum (n_splits, T).
    """
    fn, norm_weight, n_splits = projection
    num_tokens, mhc_mult, hidden = new_residual.shape
    arch = get_arch(fn.device)
    is_normed, has_comb = norm_weight is not None, arguments.comb_res_mix is not None
    steps = ProjectionConfig.best(fn.shape[0], fn.shape[1], n_splits, "normed" if is_normed else "float32", arch)
    mul, sqrsum = new_sums(fn, n_splits, num_tokens)
    kernel = post_project_kernel(mhc_mult, hidden, has_comb, n_splits, is_normed, steps.block_channels, arch)
    kernel(*arguments, fn, norm_weight, new_residual.view(num_tokens, -1), mul, sqrsum)
    return mul, sqrsum
