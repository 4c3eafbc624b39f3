"""How a thread block's threads share rows; it fixes the order of the sum over a row's channels.

A thread holds vectors of 32 bytes. The L lanes of a row take its vectors in turn, lane l the vectors l, l + L, …

    bfloat16, hidden 7168, L = 448            float32, hidden 7168, L = 448
    channels  0 … 15   16 … 31  …  7167       channels  0 … 7   8 … 15  …  3583   3584 … 3591  …
    lane         0        1     …   447       lane        0       1     …   447        0       …

The sum over a row: each lane by fused multiply-adds from 0, its channels ascending; then the lanes of a warp in pairs,
16, 8, 4, 2 and 1 lanes apart; then the warps ascending from 0. Channels past hidden are zeros, which change no sum. So
the order depends on hidden and the dtype alone.
"""

from dataclasses import replace

import torch

from tk_core.math import align, ceil_div
from tk_quant.cast.config import TileConfig

GROUPS = (16, 32, 64, 128)
"""Channels of a group of a cast, if it is not the whole row."""
WARP = 32
PART_SEGMENTS = 32
"""Segments of the backward's parts: the parts of each are summed, then the segments."""
_BYTES = 32
_MAX_LANES = 512
_MIN_THREADS = 128


def lanes_of(hidden: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(vec, lanes, pieces): channels of a vector, threads that share a row, and vectors that each of them has."""
    vec = _BYTES // dtype.itemsize
    num_vectors = ceil_div(hidden, vec)
    if num_vectors <= WARP:
        return vec, 1 << (num_vectors - 1).bit_length(), 1
    pieces = ceil_div(num_vectors, _MAX_LANES)
    return vec, align(ceil_div(num_vectors, pieces), WARP), pieces


def row_tile(hidden: int, dtype: torch.dtype, group: int | None = None) -> TileConfig:
    """A tile of whole rows: one, or more of them where rows are narrow. A block is one group of a cast, or a vector.

    A group of all channels that takes more than a warp is split in parts of a warp each.
    """
    vec, lanes, pieces = lanes_of(hidden, dtype)
    rows = 1 if lanes > _MIN_THREADS // 2 else _MIN_THREADS // lanes
    channels = lanes * pieces * vec
    size = vec if group is None else min(group if group in GROUPS else WARP * vec, channels)
    return TileConfig(rows, 1, channels // size, size, vec, 1, rows * lanes)


def piece_tile(hidden: int, dtype: torch.dtype) -> TileConfig:
    """A tile of the first vector of each lane of the rows that `row_tile` has."""
    vec, lanes, _ = lanes_of(hidden, dtype)
    return replace(row_tile(hidden, dtype), blocks_across=lanes, block_channels=vec)


def blocks_per_sm(hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> int:
    """Thread blocks of the backward that must fit on an SM, which has 65536 registers. nvcc must not spill any."""
    vec, _, pieces = lanes_of(hidden, dtype)
    registers = 88 if torch.float32 in (dtype, weight_dtype) else 72
    return max(65536 // (row_tile(hidden, dtype).threads * (registers if vec * pieces <= 16 else 128)), 1)


def num_parts(num_rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Thread blocks of the backward, each with a part of the weight's gradient: as many as fit on 132 SMs, on any GPU.

    No more than there are tiles of rows.
    """
    return min(132 * blocks_per_sm(hidden, dtype, dtype), ceil_div(num_rows, row_tile(hidden, dtype).blocks_down))
