"""How the projection's kernels are launched: what they take and write, and the size of their steps."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from tk_core.arch import Arch
from tk_core.math import align

CHANNEL_BLOCK = 64
"""Channels of a block: splits consist of whole blocks."""

Output = Literal["partials", "sums", "mixes"]
"""What the kernel writes: each split's sums, the sums of all splits, or mixes and, for sums of squares, rstd."""

Weights = Literal["float32", "normed", "parts"]
"""What the kernel takes: fn; fn to be multiplied by the norm's weight; or high and low parts, made before."""


class Projection(NamedTuple):
    """The weights, fn (rows, width) and norm_weight (width,) or None for ones, and the number of splits."""

    fn: Tensor
    norm_weight: Tensor | None
    n_splits: int


@dataclass(frozen=True)
class ProjectionConfig:
    """Launch knobs."""

    block_channels: int
    """Channels of a step: all splits begin and end at multiples of it."""
    num_stages: int
    """Steps in flight."""
    num_parts: int = 1
    """Steps whose converted weights are in flight, where warps of their own convert them."""
    block_tokens: int = 64

    @staticmethod
    def best(num_rows: int, group_width: int, n_splits: int, weights: Weights, arch: Arch) -> "ProjectionConfig":
        """The longest steps that splits and shared memory allow, up to 256 channels on Hopper, elsewhere 128.

        They are the same for weights converted here or before, for the bits depend on them. Width 28672 on an H200,
        8192 tokens, weights converted before: 132 µs with steps of 128 channels, 114 with 256.
        """
        num_blocks = group_width // CHANNEL_BLOCK
        edges = {s * num_blocks // n_splits for s in range(n_splits + 1)}
        room = arch.max_shared_memory - 2048
        for blocks_a_step in (4, 2, 1) if arch.has_wgmma else (2, 1):
            block_channels = blocks_a_step * CHANNEL_BLOCK
            x_bytes, fn_bytes = 2 * ProjectionConfig.block_tokens * block_channels, 4 * (num_rows + 1) * block_channels
            parts_bytes = 2 * 2 * padded_rows(num_rows) * block_channels
            least_bytes = max(2 * (x_bytes + parts_bytes) if arch.has_wgmma else 0, x_bytes + fn_bytes + parts_bytes)
            if least_bytes <= room and all(edge % blocks_a_step == 0 for edge in edges):
                break
        if weights == "parts":
            return ProjectionConfig(block_channels, num_stages=min(6, room // (x_bytes + parts_bytes)))
        if not arch.has_wgmma:
            num_stages = min(4, room // (x_bytes + fn_bytes + parts_bytes)) if arch.has_tma else 0
            return ProjectionConfig(block_channels, num_stages)
        num_parts = min(2, room // (x_bytes + fn_bytes + parts_bytes))
        return ProjectionConfig(
            block_channels, min(4, (room - num_parts * parts_bytes) // (x_bytes + fn_bytes)), num_parts
        )


def padded_rows(num_rows: int) -> int:
    """Rows of fn, padded: of 24, TileLang would multiply 8 at a time on Hopper. The padding's results are not read."""
    return align(num_rows, 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32)
