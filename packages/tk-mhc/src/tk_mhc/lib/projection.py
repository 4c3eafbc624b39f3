"""The projection of normalized streams on the rows of fn: a matrix product with the sums of squares beside it.

    mul[s, t, j]    = Σ_c x[t, c] · F[j, c]        F = fn · norm_weight, c in split s
    sqrsum[s, t]    = Σ_c x[t, c]²
    mixes[t, j]     = (Σ_s mul[s, t, j]) · rsqrt((Σ_s sqrsum[s, t]) / width + eps)

x is bfloat16 (num_tokens, width), width = m·H for the residual's streams, which lie side by side.

Arithmetic: x is exact in bfloat16; a float32 weight becomes the sum of two bfloat16, high = bf16(F) and
low = bf16(F - high), which hold 16 of its 24 bits. Tensor cores multiply x with both and add in float32. So a weight is
off by 2^-17 of itself at most, where TF32, which keeps 11 bits, would be off by 2^-12, in as many tensor core cycles.

The order of the sums is fixed by the width and S = n_splits: width is cut into B blocks of 64 channels, split s has
blocks ⌊s·B/S⌋ to ⌊(s+1)·B/S⌋ - 1, each split is added up on its own, and then the splits one after the other. It does
not matter where: for many tokens a thread block walks all splits, for few each thread block has some splits, whose sums
the next kernel adds up. Nor where the weights are converted: for many tokens a kernel before this one does it, once.

lib/project_wgmma.py has the kernel for Hopper, lib/project_mma.py the one for other GPUs.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_mhc.lib.convert_fn import convert_fn
from tk_mhc.lib.project_mma import project_mma_kernel
from tk_mhc.lib.project_wgmma import project_wgmma_kernel
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, Output, Projection, ProjectionConfig, Weights
from tk_mhc.lib.sum_splits import launch_sum_splits
from tk_mhc.lib.tokens import Streams, check_norm_weight, mix_counts

CONVERT_TOKENS = 2048
"""From this many tokens on, on Hopper, the weights are converted by a kernel of their own.

Width 28672 on an H200, with that kernel and without: 1024 tokens 22.9 and 21.4 µs, 2048 38.0 and 39.8, 4096 68.5 and
76.1, 8192 118 and 144.
"""

SUM_TOKENS = 256
"""From this many tokens on, a kernel of its own adds up the splits' sums, not each thread block of the next kernel.

mhc_pre_big_fuse, m 4, H 7168, on an H200, with that kernel and without: 64 tokens 11.6 and 10.4 µs, 128 12.8 and 12.7,
256 15.9 and 17.9, 1024 42.6 and 53.4, 4096 148 and 214.
"""


def default_n_splits(width: int) -> int:
    """As few splits as have equal lengths of at most 512 channels, in steps of 256, 128 or 64 that divide the width.

    So even few tokens reach many SMs. Longer splits would save work where there are many tokens, but little:
    width 28672 on an H200, 8192 tokens, 28 and 56 splits: 113 and 115 µs; 64 tokens, with an older kernel: 8.9 and 5.9.
    """
    num_blocks = width // CHANNEL_BLOCK
    blocks_a_step = max(n for n in (1, 2, 4) if num_blocks % n == 0)
    num_steps = num_blocks // blocks_a_step
    return next(s for s in range(1, num_steps + 1) if num_steps % s == 0 and num_steps // s * blocks_a_step <= 8)


def takes_all_splits(num_tokens: int, n_splits: int, device: torch.device) -> bool:
    """Whether each thread block walks all splits: for many tokens, or a single split."""
    return splits_per_worker(num_tokens, 1, n_splits, device) == n_splits


def splits_per_worker(num_tokens: int, num_rms_groups: int, n_splits: int, device: torch.device) -> int:
    """How many splits a thread block takes: as few as leave at most one thread block an SM, all for many tokens."""
    num_tiles = ceil_div(num_tokens, ProjectionConfig.block_tokens) * num_rms_groups
    return ceil_div(n_splits, max(1, get_num_sms(device) // num_tiles))


def launch_projection(
    output: Output, x: Tensor, projection: Projection, mul: Tensor, sqrsum: Tensor, eps: float = 0.0
) -> None:
    """Launch the projection of x (T, width).

    Writes mul (n_splits or 1, T, groups · rows) and sqrsum (n_splits or 1, T · groups), where groups, the rms groups,
    are as many as mul has room for. With "mixes" these are mixes and rstd, for which `eps` is.
    """
    fn, norm_weight, n_splits = projection
    num_tokens, (num_rows, width) = x.shape[0], fn.shape
    num_rms_groups = mul.shape[2] // num_rows
    arch = get_arch(x.device)
    weights: Weights = "float32" if norm_weight is None else "normed"
    parts = None
    if arch.has_wgmma and num_tokens >= CONVERT_TOKENS:
        weights, parts = "parts", convert_fn(fn, norm_weight)
    config = ProjectionConfig.best(num_rows, width // num_rms_groups, n_splits, weights, arch)
    kernel = project_wgmma_kernel if arch.has_wgmma else project_mma_kernel
    splits = splits_per_worker(num_tokens, num_rms_groups, n_splits, x.device) if output == "partials" else n_splits
    launch = kernel(num_rows, width, n_splits, num_rms_groups, weights, output, config, arch)
    launch(x, fn, parts, norm_weight, mul, sqrsum, eps, splits)


def new_sums(fn: Tensor, num_splits: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Workspaces for mul (num_splits, num_tokens, rows of fn) and sqrsum (num_splits, num_tokens)."""
    return fn.new_empty((num_splits, num_tokens, fn.shape[0])), fn.new_empty((num_splits, num_tokens))


def launch_sums(x: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """The projection's sums, for a kernel that adds up what it gets: for few tokens each split's, otherwise the total.

    Returns mul (splits or 1, T, rows of fn) and sqrsum (splits or 1, T).
    """
    fn, _, n_splits = projection
    num_tokens = x.shape[0]
    if takes_all_splits(num_tokens, n_splits, x.device):
        mul, sqrsum = new_sums(fn, 1, num_tokens)
        launch_projection("sums", x, projection, mul, sqrsum)
        return mul, sqrsum
    partial_mul, partial_sqrsum = new_sums(fn, n_splits, num_tokens)
    launch_projection("partials", x, projection, partial_mul, partial_sqrsum)
    if num_tokens < SUM_TOKENS:
        return partial_mul, partial_sqrsum
    mul, sqrsum = new_sums(fn, 1, num_tokens)
    launch_sum_splits(partial_mul, partial_sqrsum, mul.squeeze(0), sqrsum.squeeze(0))
    return mul, sqrsum


def check_projection(streams: Streams, fn: Tensor, norm_weight: Tensor | None, n_splits: int | None) -> Projection:
    """Raise TypeError or ValueError that names the argument, unless these can project the streams on their mixes."""
    num_rows, _ = check.tensor("fn", fn, (torch.float32,), ("rows", streams.width), device=streams.device)
    counts = mix_counts(streams.mhc_mult)
    check.require(num_rows in counts, "rows of fn", "{}, or {} without comb", num_rows, *counts)
    check_norm_weight("norm_weight", norm_weight, streams)
    return Projection(fn, norm_weight, check_n_splits(n_splits, streams.width))


def check_n_splits(n_splits: int | None, width: int) -> int:
    """The number of splits: `n_splits`, at most one for each block of 64 channels, or the default for None.

    Raises TypeError unless it is an int or None, ValueError below 1.
    """
    if n_splits is None:
        return default_n_splits(width)
    check.integer("n_splits", n_splits)
    check.require(n_splits >= 1, "n_splits", "at least 1", n_splits)
    return min(n_splits, width // CHANNEL_BLOCK)
