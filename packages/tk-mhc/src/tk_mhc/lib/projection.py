"""The projection of normalized streams on the rows of fn: a matrix product with the sums of squares beside it.

    mul[s, t, j]    = Σ_c x[t, c] · F[j, c]        F = fn · norm_weight, c in split s
    sqrsum[s, t]    = Σ_c x[t, c]²
    mixes[t, j]     = (Σ_s mul[s, t, j]) · rsqrt((Σ_s sqrsum[s, t]) / width + eps)

x is bfloat16 (num_tokens, width), width = m·H for the residual's streams, which lie side by side.

Arithmetic: x is exact in bfloat16; a float32 weight becomes the sum of two bfloat16, high = bf16(F) and
low = bf16(F - high), which hold 16 of its 24 bits. Tensor cores multiply x with both and add in float32. So a weight is
off by 2^-17 of itself at most, where TF32, which keeps 11 bits, would be off by 2^-12, in as many tensor core cycles.

The order of the sums is fixed by the width and n_splits: width is cut into B blocks of 64 channels, split s has blocks
⌊s·B/S⌋ to ⌊(s+1)·B/S⌋ - 1, each split is added up on its own, and then the splits one after the other. Who adds them
changes nothing: for many tokens a thread block walks all splits, for few each thread block has some splits of its own,
and their sums meet in the next kernel.

    thread block = 64 tokens (rows of the product) × some splits

    x     64 × 128 bfloat16, by TMA ───────────────┐
    fn    rows × 128 float32, by TMA → high, low ──┴→ tensor cores: 64 × 2·rows, float32
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms

CHANNEL_BLOCK = 64
"""Channels of a block: splits consist of whole blocks."""

Output = Literal["partials", "sums", "mixes"]
"""What the kernel writes: each split's sums, the sums of all splits, or the mixes (and in place of squares, rstd)."""


def default_n_splits(width: int) -> int:
    """Splits of 512 channels: so many that few tokens reach many multiprocessors.

    Fewer would spare work where there are many tokens. At width 28672 on an H200, 64 and 8192 tokens, mhc_pre_norm_fn's
    projection takes 8.9 and 192 µs with 28 splits, 5.9 and 204 with 56, 4.6 and 230 with 112.
    """
    return ceil_div(width // CHANNEL_BLOCK, 8)


@dataclass(frozen=True)
class ProjectionConfig:
    """Launch knobs."""

    block_channels: int
    """Channels of a step: all splits begin and end at multiples of it."""
    num_stages: int
    """Steps in flight."""
    block_tokens: int = 64
    threads: int = 256

    @staticmethod
    def best(num_rows: int, group_width: int, n_splits: int, arch: Arch) -> "ProjectionConfig":
        """Steps of 128 channels where the splits allow it; in flight are four, or as many as half the memory holds.

        On an H200, width 28672, 8192 tokens, 28 splits: 273 µs with 64 channels, 192 with 128, 184 with 256.
        """
        num_blocks = group_width // CHANNEL_BLOCK
        edges = {s * num_blocks // n_splits for s in range(n_splits + 1)}
        block_channels = 2 * CHANNEL_BLOCK if all(edge % 2 == 0 for edge in edges) else CHANNEL_BLOCK
        stage_bytes = block_channels * (2 * 64 + 4 * num_rows)
        parts_bytes = 2 * 2 * padded_rows(num_rows) * block_channels
        room = arch.max_shared_memory * (3 if arch.max_shared_memory < 128 * 1024 else 2) // 4 - parts_bytes
        return ProjectionConfig(
            block_channels,
            num_stages=max(1, min(4 * 128 // block_channels, room // stage_bytes)) if arch.has_tma else 0,
        )


def padded_rows(num_rows: int) -> int:
    """Rows of the product: of 24, Hopper's tensor cores would take 8 at a time. Nobody reads what the others add."""
    return align(num_rows, 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32)


@kernel
def project_kernel(
    num_rows: int,
    width: int,
    n_splits: int,
    num_rms_groups: int,
    has_norm_weight: bool,
    output: Output,
    config: ProjectionConfig,
    arch: Arch,
) -> Any:
    """The product of (num_tokens, width) and (num_rows, width), each of the rms groups of channels on its own.

    With output "partials" a thread block takes `splits_a_worker` of the splits, otherwise all of them.
    """
    import tilelang.language as T

    block_tokens, block_channels = config.block_tokens, config.block_channels
    half_channels = block_channels // 2
    group_width = width // num_rms_groups
    num_blocks = group_width // CHANNEL_BLOCK
    blocks_a_step = block_channels // CHANNEL_BLOCK
    product_rows = padded_rows(num_rows)
    num_partials = n_splits if output == "partials" else 1
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def split_weights(fn_tile: T.Buffer, weight: T.Buffer, parts: T.Buffer) -> None:
        for j, c in T.Parallel(num_rows, block_channels):
            weighted = fn_tile[j, c] * weight[c] if has_norm_weight else fn_tile[j, c]
            parts[j, c] = T.cast(weighted, "bfloat16")
            parts[product_rows + j, c] = T.cast(weighted - T.cast(T.cast(weighted, "bfloat16"), "float32"), "bfloat16")

    @T.macro
    def add_squares(x_tile: T.Buffer, first_channel: int, squares: T.Buffer) -> None:
        for i, c in T.Parallel(block_tokens, half_channels):
            value = T.cast(x_tile[i, first_channel + c], "float32")
            squares[i, c] = T.fma(value, value, squares[i, c])

    @T.macro
    def write(
        first_token: Any, group: Any, split: Any, sums: T.Buffer, square_sum: T.Buffer, mul: T.Buffer, sqrsum: T.Buffer
    ) -> None:
        for i, j in T.Parallel(block_tokens, num_rows):
            if first_token + i < num_tokens:
                mul[split, first_token + i, group * num_rows + j] = sums[i, j]
        for i in T.Parallel(block_tokens):
            if first_token + i < num_tokens:
                sqrsum[split, (first_token + i) * num_rms_groups + group] = square_sum[i]

    @T.prim_func
    def project(
        x: T.Tensor((num_tokens, width), "bfloat16"),
        fn: T.Tensor((num_rows, width), "float32"),
        norm_weight: T.Tensor((width,), "float32"),
        mul: T.Tensor((num_partials, num_tokens, num_rms_groups * num_rows), "float32"),
        sqrsum: T.Tensor((num_partials, num_tokens * num_rms_groups), "float32"),
        eps: T.float32,
        splits_a_worker: T.int32,
    ) -> None:
        num_tiles, num_workers = T.ceildiv(num_tokens, block_tokens), T.ceildiv(n_splits, splits_a_worker)
        with T.Kernel(num_tiles, num_workers, num_rms_groups, threads=config.threads) as (tile, worker, group):
            x_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            fn_tile = T.alloc_shared((num_rows, block_channels), "float32")
            weight = T.alloc_shared((block_channels,), "float32")
            parts = T.alloc_shared((2 * product_rows, block_channels), "bfloat16")
            product = T.alloc_fragment((block_tokens, 2 * product_rows), "float32")
            halves = T.alloc_shared((block_tokens, 2 * product_rows), "float32")
            sums = T.alloc_shared((block_tokens, num_rows), "float32")
            squares = T.alloc_fragment((block_tokens, half_channels), "float32")
            square_sum = T.alloc_fragment((block_tokens,), "float32")
            rstd = T.alloc_shared((block_tokens,), "float32")
            first_token = tile * block_tokens
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            first_split = worker * splits_a_worker
            end_split = T.min(first_split + splits_a_worker, n_splits)
            first_step = first_split * num_blocks // n_splits // blocks_a_step
            num_steps = end_split * num_blocks // n_splits // blocks_a_step - first_step

            T.clear(product)
            T.clear(squares)
            T.clear(square_sum)
            for step in T.Pipelined(num_steps, num_stages=config.num_stages):
                channel = group * group_width + (first_step + step) * block_channels
                T.copy(fn[:, channel : channel + block_channels], fn_tile)
                if has_norm_weight:
                    T.copy(norm_weight[channel : channel + block_channels], weight)
                T.copy(x[first_token : first_token + block_tokens, channel : channel + block_channels], x_tile)
                split_weights(fn_tile, weight, parts)
                if arch.has_wgmma:
                    # Squares while the tensor cores work, but some of them after: x_tile's last use gives it back.
                    T.wgmma_gemm(x_tile, parts, product, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    add_squares(x_tile, 0, squares)
                    T.wait_wgmma(0)
                else:
                    T.gemm(x_tile, parts, product, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    add_squares(x_tile, 0, squares)
                add_squares(x_tile, half_channels, squares)
                # The split that ends with this step, if one does.
                blocks_done = (first_step + step + 1) * blocks_a_step
                splits_done = T.ceildiv(blocks_done * n_splits, num_blocks)
                if splits_done * num_blocks < (blocks_done + 1) * n_splits:
                    T.copy(product, halves)
                    for i, j in T.Parallel(block_tokens, num_rows):
                        before = T.float32(0)
                        if output != "partials":
                            before = T.if_then_else(splits_done > first_split + 1, sums[i, j], T.float32(0))
                        sums[i, j] = before + (halves[i, j] + halves[i, product_rows + j])
                    T.reduce_sum(squares, square_sum, dim=1, clear=False)
                    if output == "partials":
                        write(first_token, group, splits_done - 1, sums, square_sum, mul, sqrsum)
                        T.clear(square_sum)
                    T.clear(product)
                    T.clear(squares)
            if output == "mixes":
                for i in T.Parallel(block_tokens):
                    square_sum[i] = T.rsqrt(square_sum[i] / T.float32(group_width) + eps)
                T.copy(square_sum, rstd)
                for i, j in T.Parallel(block_tokens, num_rows):
                    sums[i, j] = sums[i, j] * rstd[i]
            if output != "partials":
                write(first_token, group, 0, sums, square_sum, mul, sqrsum)

    return project


def splits_per_worker(num_tokens: int, n_splits: int, num_sms: int) -> int:
    """How many splits a thread block takes: as few as give every multiprocessor a thread block, all for many tokens."""
    num_tiles = ceil_div(num_tokens, ProjectionConfig.block_tokens)
    return ceil_div(n_splits, max(1, num_sms // num_tiles))


def launch_partials(
    x: Tensor, fn: Tensor, norm_weight: Tensor | None, n_splits: int, mul: Tensor, sqrsum: Tensor
) -> None:
    """Write each split's sums: mul (n_splits, T, groups · rows of fn), sqrsum (n_splits, T · groups)."""
    num_tokens, num_rows, width = x.shape[0], fn.shape[0], fn.shape[1]
    num_rms_groups = mul.shape[2] // num_rows
    arch = get_arch(x.device)
    config = ProjectionConfig.best(num_rows, width // num_rms_groups, n_splits, arch)
    kernel = project_kernel(
        num_rows, width, n_splits, num_rms_groups, norm_weight is not None, "partials", config, arch
    )
    splits = splits_per_worker(num_tokens * num_rms_groups, n_splits, get_num_sms(x.device))
    kernel(x, fn, norm_weight, mul, sqrsum, 0.0, splits)


def launch_sums(x: Tensor, fn: Tensor, norm_weight: Tensor | None, n_splits: int) -> tuple[Tensor, Tensor]:
    """The projection's sums for a kernel that adds up what it gets: of each split, or for many tokens of all splits.

    Returns mul (splits or 1, T, rows of fn) and sqrsum (splits or 1, T).
    """
    num_tokens, (num_rows, width) = x.shape[0], fn.shape
    whole = splits_per_worker(num_tokens, n_splits, get_num_sms(x.device)) == n_splits
    num_partials = 1 if whole else n_splits
    mul = x.new_empty((num_partials, num_tokens, num_rows), dtype=torch.float32)
    sqrsum = x.new_empty((num_partials, num_tokens), dtype=torch.float32)
    if whole:
        arch = get_arch(x.device)
        config = ProjectionConfig.best(num_rows, width, n_splits, arch)
        kernel = project_kernel(num_rows, width, n_splits, 1, norm_weight is not None, "sums", config, arch)
        kernel(x, fn, norm_weight, mul, sqrsum, 0.0, n_splits)
    else:
        launch_partials(x, fn, norm_weight, n_splits, mul, sqrsum)
    return mul, sqrsum


def check_n_splits(n_splits: int | None, width: int) -> int:
    """The number of splits: `n_splits`, at most a split a block of 64 channels, or the default for None.

    Raises TypeError unless it is an int or None, ValueError below 1.
    """
    if n_splits is None:
        return default_n_splits(width)
    check.integer("n_splits", n_splits)
    check.require(n_splits >= 1, "n_splits", "at least 1", n_splits)
    return min(n_splits, width // CHANNEL_BLOCK)
