"""The projection's kernel on GPUs other than Hopper: one pipelined loop.

A thread block takes 64 tokens and some splits, in steps of 128 channels, or of 64 where splits or shared memory ask it:

    x     64 × 128 bfloat16 ──────────────────┐
    fn    rows × 128 float32 → high, low ─────┴→ tensor cores: 64 × rows, float32
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, Output, ProjectionConfig, Weights, padded_rows


@kernel
def project_mma_kernel(
    num_rows: int,
    width: int,
    n_splits: int,
    num_rms_groups: int,
    weights: Weights,
    output: Output,
    config: ProjectionConfig,
    arch: Arch,
) -> Any:
    """The product of x (num_tokens, width) and fn (num_rows, width), of each rms group of channels on its own.

    With output "partials" a thread block takes `splits_a_worker` of the splits, otherwise all of them. The
    kernel takes `fn_parts` as Hopper's does, but does not read it.
    """
    import tilelang.language as T

    from tk_mhc.lib.projection_tiles import SplitSteps, add_squares, convert_weights, write_squares, write_sums

    block_tokens, block_channels = config.block_tokens, config.block_channels
    group_width = width // num_rms_groups
    steps = SplitSteps(n_splits, group_width // CHANNEL_BLOCK, block_channels // CHANNEL_BLOCK)
    product_rows = padded_rows(num_rows)
    num_partials = n_splits if output == "partials" else 1
    num_tokens = T.dynamic("num_tokens")
    is_normed = weights == "normed"

    @T.prim_func
    def project(
        x: T.Tensor((num_tokens, width), "bfloat16"),
        fn: T.Tensor((num_rows, width), "float32"),
        fn_parts: T.Tensor((2, num_rows, width), "bfloat16"),
        norm_weight: T.Tensor((width,), "float32"),
        mul: T.Tensor((num_partials, num_tokens, num_rms_groups * num_rows), "float32"),
        sqrsum: T.Tensor((num_partials, num_tokens * num_rms_groups), "float32"),
        eps: T.float32,
        splits_a_worker: T.int32,
    ) -> None:
        num_tiles, num_workers = T.ceildiv(num_tokens, block_tokens), T.ceildiv(n_splits, splits_a_worker)
        with T.Kernel(num_tiles, num_workers, num_rms_groups, threads=128) as (tile, worker, group):
            x_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            fn_tile = T.alloc_shared((num_rows, block_channels), "float32")
            weight = T.alloc_shared((block_channels,), "float32")
            parts = T.alloc_shared((2, product_rows, block_channels), "bfloat16")
            product = T.alloc_fragment((block_tokens, product_rows), "float32")
            squares = T.alloc_fragment((block_tokens, CHANNEL_BLOCK), "float32")
            square_sum = T.alloc_fragment((block_tokens,), "float32")
            if output != "partials":
                sums = T.alloc_fragment((block_tokens, product_rows), "float32")
                rstd = T.alloc_shared((block_tokens,), "float32")
            first_token = tile * block_tokens
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            first_split = worker * splits_a_worker
            end_split = T.min(first_split + splits_a_worker, n_splits)
            first_step = steps.first(first_split)
            num_steps = steps.first(end_split) - first_step

            T.clear(product)
            T.clear(squares)
            T.clear(square_sum)
            if output != "partials":
                T.clear(sums)
            for step in T.Pipelined(num_steps, num_stages=config.num_stages):
                channel = group * group_width + (first_step + step) * block_channels
                T.copy(fn[:, channel : channel + block_channels], fn_tile)
                if is_normed:
                    T.copy(norm_weight[channel : channel + block_channels], weight)
                T.copy(x[first_token : first_token + block_tokens, channel : channel + block_channels], x_tile)
                convert_weights(fn_tile, weight if is_normed else None, parts)
                T.gemm(x_tile, parts[0, :, :], product, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(x_tile, parts[1, :, :], product, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                add_squares(x_tile, squares)
                if steps.ends_split(first_step + step):
                    T.reduce_sum(squares, square_sum, dim=1, clear=False)
                    if output == "partials":
                        write_sums(
                            product, mul, steps.done(first_step + step) - 1, first_token, group * num_rows, num_rows
                        )
                        write_squares(
                            square_sum, sqrsum, steps.done(first_step + step) - 1, first_token, group, num_rms_groups
                        )
                        T.clear(square_sum)
                    else:
                        for i, j in T.Parallel(block_tokens, product_rows):
                            sums[i, j] = sums[i, j] + product[i, j]
                    T.clear(product)
                    T.clear(squares)

            if output == "mixes":
                for i in T.Parallel(block_tokens):
                    square_sum[i] = T.rsqrt(square_sum[i] / T.float32(group_width) + eps)
                T.copy(square_sum, rstd)
                for i, j in T.Parallel(block_tokens, product_rows):
                    sums[i, j] = sums[i, j] * rstd[i]
            if output != "partials":
                write_sums(sums, mul, 0, first_token, group * num_rows, num_rows)
                write_squares(square_sum, sqrsum, 0, first_token, group, num_rms_groups)

    return project
