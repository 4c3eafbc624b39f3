"""per_channel_cast_and_transpose: quantize each channel by blocks of tokens, and transpose the data.

For each channel of each block of num_per_tokens tokens, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 (num_tokens, hidden); data float8_e4m3fn (hidden, num_tokens); sf float32
(num_tokens / num_per_tokens, hidden), not transposed; num_per_tokens 32 or 128.

A thread block takes 128 tokens by `channels`. A thread reads `rows` neighbouring tokens of 8 channels, once, and keeps
them in registers. Three meetings in shared memory:

                 8 or 16 lanes × 8 channels
               ┌────┬────┬─  ─┬────┐        1. amax of each thread's channels
     row lanes │ t0 │ t1 │ …  │    │        2. one thread for each channel and block makes sf and the factor of it
     × rows    ├────┼────┼─  ─┼────┤        3. the codes, four tokens of a channel a word, in a tile that is read the
               │    │    │    │    │           other way: 8 lanes store 128 tokens of a channel
               └────┴────┴─  ─┴────┘
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
from tk_quant.lib.quantize import TILE_ROWS
from tk_quant.per_channel.per_channel_cast import check_blocks

_SIZES = (32, 128)
_VEC = 8


@dataclass(frozen=True)
class PerChannelCastAndTransposeConfig:
    """Launch knobs: the tile, how much of it a thread takes, and which is next."""

    channels: int
    """Channels of a tile: 64 or 128."""
    rows: int
    """Tokens of a thread: 4, 8 or 16."""
    rows_first: bool
    """Whether neighbouring blocks take neighbouring tokens, rather than channels."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(hidden: int, arch: Arch) -> "PerChannelCastAndTransposeConfig":
        """The configuration for a hidden size and an architecture."""
        # Narrow tensors have few tiles: smaller ones spread them better. More blocks, and nvcc spills registers.
        if hidden >= 4096 and hidden % 128 == 0:
            return PerChannelCastAndTransposeConfig(channels=128, rows=16, rows_first=True, blocks_per_sm=3)
        return PerChannelCastAndTransposeConfig(channels=64, rows=8, rows_first=False, blocks_per_sm=5)


@kernel(pass_configs={**DIRECT_COPIES, "tl.enable_lower_ldgstg": True, "tl.disable_shared_memory_reuse": True})
def _per_channel_cast_and_transpose_kernel(
    alignment: int,
    hidden: int,
    num_per_tokens: int,
    round_sf: bool,
    config: PerChannelCastAndTransposeConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    from tk_quant.lib import channel_tiles as tiles

    channels = config.channels
    tile = tiles.ChannelTile(channels, config.rows, _VEC, num_per_tokens)
    col_tiles = ceil_div(hidden, channels)
    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")
    row_tiles = T.ceildiv(num_tokens, TILE_ROWS)
    grid = (row_tiles, col_tiles) if config.rows_first else (row_tiles * col_tiles, 1)

    @T.prim_func
    def per_channel_cast_and_transpose(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), "bfloat16"),
        out: T.Tensor((hidden, num_tokens), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(*grid, threads=tile.threads) as (first, second):
            # Loads of two bytes need more registers.
            T.annotate_min_blocks_per_sm(config.blocks_per_sm if alignment >= 4 else config.blocks_per_sm // 2)
            # Checked by the op: what vector accesses need to know of the strides.
            T.assume(num_tokens % TILE_ROWS == 0)
            T.assume(row_stride % max(alignment // 2, 1) == 0)
            row_tile = first if config.rows_first else first // col_tiles
            channel = (second if config.rows_first else first % col_tiles) * channels
            columns = tiles.columns_of(tiles.load_values(x, row_tile * TILE_ROWS, channel, tile), tile)
            factors = tiles.factors_of_blocks(columns, sf, row_tile * tile.blocks, channel, tile, round_sf)
            tiles.store_transposed_codes(columns, factors, out, row_tile * TILE_ROWS, channel, tile)

    return per_channel_cast_and_transpose


@op(
    "tk_quant::per_channel_cast_and_transpose_out",
    mutates=("out", "sf"),
    reference="per_channel_cast_and_transpose",
    translate=lambda call: {"fmt": "e4m3"},
)
def _per_channel_cast_and_transpose_out(
    x: Tensor, out: Tensor, sf: Tensor, num_per_tokens: int, round_sf: bool
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    config = PerChannelCastAndTransposeConfig.best(x.shape[1], arch)
    _per_channel_cast_and_transpose_kernel(check.row_alignment(x), x.shape[1], num_per_tokens, round_sf, config, arch)(
        x, out, sf
    )


@replayable
def per_channel_cast_and_transpose(
    x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel and 32 or 128 tokens, and transpose the data.

    For each block: amax = max(max |x|, 1e-4), sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf =
    the least power of two at least amax / 448, data = round(x * (1 / sf)). Name, arguments and formula are those of
    DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_tokens: 32 or 128, tokens of a block.
        round_sf: whether scale factors are powers of two.

    Returns:
        data float8_e4m3fn (hidden, num_tokens) and sf float32 (num_tokens / num_per_tokens, hidden), both contiguous. A
        block with an infinity or a NaN has that for sf.

    Raises:
        TypeError: x is no bfloat16 tensor, or an argument has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            num_per_tokens is none of those above.
    """
    num_tokens, hidden = check.tensor("x", x, (torch.bfloat16,), ("num_tokens", "hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check_blocks(fmt, num_per_tokens, round_sf, _SIZES)
    data = x.new_empty((hidden, num_tokens), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _per_channel_cast_and_transpose_out(x, data, sf, num_per_tokens, round_sf)
    return data, sf
