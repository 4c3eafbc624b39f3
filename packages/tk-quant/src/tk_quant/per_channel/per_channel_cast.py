"""per_channel_cast: quantize each channel by blocks of 128 tokens.

For each channel of each block of 128 tokens, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x (num_tokens, hidden), bfloat16 or float32; data float8_e4m3fn (num_tokens, hidden), sf float32
(num_tokens / 128, hidden). per_channel_cast_fused launches the same kernel, or with a map from rows of data to those of
x that of lib/gathered_cast.py; per_channel_cast_and_transpose launches it too.

A thread block takes 128 rows by `channels`. A thread has `rows` neighbouring rows of `vec` channels, reads them once
and keeps them in registers. They meet in shared memory twice:

              channels / vec lanes
               ┌────┬────┬─  ─┬─────┐       1. amax of each thread's channels
     row lanes │ t0 │ t1 │ …  │ t15 │       2. one thread for each channel makes sf, and the factor, from 128 / rows of
     × rows    ├────┼────┼─  ─┼─────┤          them
               │ t16│ …  │    │     │
               └────┴────┴─  ─┴─────┘       A warp reads and writes at least 128 bytes of a row at once.

Data to be transposed meet there once more: the codes in a tile that is read the other way, so that 8 lanes store 128
tokens of a channel.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_quant.lib.gathered_cast import gathered_cast_kernel
from tk_quant.lib.quantize import TILE_ROWS

PASS_CONFIGS = {**DIRECT_COPIES, "tl.enable_lower_ldgstg": True, "tl.disable_shared_memory_reuse": True}


@dataclass(frozen=True)
class PerChannelCastConfig:
    """Launch knobs: the tile, how much of it a thread takes, and which is next."""

    channels: int
    """Channels of a tile."""
    rows: int
    """Rows of a thread: 4, 8 or 16."""
    vec: int
    """Channels of a thread: 4, 8 or 16."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""
    rows_first: bool = False
    """Whether neighbouring blocks take neighbouring rows, rather than channels."""

    @staticmethod
    @cache
    def best(itemsize: int, hidden: int, transpose: bool, arch: Arch) -> "PerChannelCastConfig":
        """The configuration for an input's element size, its width, data transposed or not, and an architecture."""
        # H200, 8192 x 7168: bfloat16 with 3 blocks 42.9 µs, with 16 rows 42.8; float32 with 3 blocks 74.6.
        if itemsize == 4:
            return PerChannelCastConfig(channels=128, rows=8, vec=4, blocks_per_sm=2)  # 69.4 µs
        if not transpose:
            return PerChannelCastConfig(channels=128, rows=8, vec=8, blocks_per_sm=4)  # 42.7 µs
        # Narrow tensors have few tiles: smaller ones spread them better. More blocks, and nvcc spills registers.
        if hidden >= 4096 and hidden % 128 == 0:
            return PerChannelCastConfig(channels=128, rows=16, vec=8, blocks_per_sm=3, rows_first=True)
        return PerChannelCastConfig(channels=64, rows=8, vec=8, blocks_per_sm=5)


@kernel(pass_configs=PASS_CONFIGS)
def per_channel_cast_kernel(
    dtype: torch.dtype,
    alignment: int,
    hidden: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    config: PerChannelCastConfig,
    arch: Arch,
) -> Any:
    """Build `per_channel_cast(x, out, sf)`; out is (hidden, num_tokens) if it is to `transpose`."""
    import tilelang.language as T

    from tk_quant.lib import channel_tiles as tiles

    channels = config.channels
    tile = tiles.ChannelTile(channels, config.rows, config.vec, num_per_tokens)
    col_tiles = ceil_div(hidden, channels)
    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")
    row_tiles = T.ceildiv(num_tokens, TILE_ROWS)
    grid = (row_tiles, col_tiles) if config.rows_first else (row_tiles * col_tiles, 1)

    @T.prim_func
    def per_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        out: T.Tensor((hidden, num_tokens) if transpose else (num_tokens, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(*grid, threads=tile.threads) as (first, second):
            # Loads of two bytes need more registers.
            T.annotate_min_blocks_per_sm(config.blocks_per_sm if alignment >= 4 else config.blocks_per_sm // 2)
            # Checked by the op: what vector accesses need to know of the strides.
            T.assume(row_stride % max(alignment // dtype.itemsize, 1) == 0)
            T.assume(num_tokens % TILE_ROWS == 0)
            row_tile = first if config.rows_first else first // col_tiles
            channel = (second if config.rows_first else first % col_tiles) * channels
            columns = tiles.columns_of(tiles.load_values(x, row_tile * TILE_ROWS, channel, tile), tile)
            factors = tiles.factors_of_blocks(columns, sf, row_tile * tile.blocks, channel, tile, round_sf)
            tiles.store_by_channel(columns, factors, out, row_tile * TILE_ROWS, channel, tile, transpose)

    return per_channel_cast


@op(
    "tk_quant::per_channel_cast_out",
    mutates=("out", "sf"),
    reference="per_channel.per_channel_cast_fused.per_channel_cast_fused",
    translate=lambda call: {"fmt": "e4m3", "num_per_tokens": TILE_ROWS},
)
def per_channel_cast_out(x: Tensor, pos_to_token: Tensor | None, out: Tensor, sf: Tensor, round_sf: bool) -> None:
    """Launch; what per_channel_cast_fused is too, for a tensor."""
    if out.numel() == 0:
        return
    arch, alignment, hidden = get_arch(x.device), check.row_alignment(x), x.shape[1]
    if pos_to_token is not None:
        gathered_cast_kernel(x.dtype, alignment, hidden, round_sf, arch)(x, pos_to_token, out, sf)
        return
    config = PerChannelCastConfig.best(x.dtype.itemsize, hidden, False, arch)
    per_channel_cast_kernel(x.dtype, alignment, hidden, TILE_ROWS, round_sf, False, config, arch)(x, out, sf)


def check_plain_cast(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool) -> tuple[int, int]:
    """Raise unless these arguments are served; (num_tokens, hidden), num_tokens whatever it is."""
    num_tokens, hidden = check.tensor("x", x, (torch.bfloat16, torch.float32), ("num_tokens", "hidden"), layout="rows")
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check_blocks(fmt, num_per_tokens, round_sf)
    return num_tokens, hidden


def check_blocks(fmt: str, num_per_tokens: int, round_sf: bool, sizes: tuple[int, ...] = (TILE_ROWS,)) -> None:
    """Raise unless a cast by channels serves these; `sizes` are those that num_per_tokens may have."""
    check.one_of("fmt", fmt, ("e4m3",))
    check.integer("num_per_tokens", num_per_tokens)
    check.one_of("num_per_tokens", num_per_tokens, sizes)
    check.flag("round_sf", round_sf)


@replayable
def per_channel_cast(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel and 128 tokens.

    For each block: amax = max(max |x|, 1e-4), sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf =
    the least power of two at least amax / 448, data = round(x * (1 / sf)). Name, arguments and formula are those of
    DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_tokens: 128.
        round_sf: whether scale factors are powers of two.

    Returns:
        data float8_e4m3fn (num_tokens, hidden) and sf float32 (num_tokens / 128, hidden), both contiguous. A block with
        an infinity or a NaN has that for sf.

    Raises:
        TypeError: x is no bfloat16 or float32 tensor, or an argument has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            num_per_tokens is none of those above.
    """
    num_tokens, hidden = check_plain_cast(x, fmt, num_per_tokens, round_sf)
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    data = x.new_empty((num_tokens, hidden), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((num_tokens // TILE_ROWS, hidden), dtype=torch.float32)
    per_channel_cast_out(x, None, data, sf, round_sf)
    return data, sf
