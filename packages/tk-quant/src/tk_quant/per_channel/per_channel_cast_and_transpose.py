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

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.lib.channel_blocks import TILE_ROWS, channel_block_macros
from tk_quant.lib.quantize import element, encode_macro, load_macro
from tk_quant.lib.transposed_tile import TILE_TOKENS, transposed_tile_macros
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
    halves: int
    """Half warps that share the work on a factor: 1, or 2 where there are threads for it."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(hidden: int, arch: Arch) -> "PerChannelCastAndTransposeConfig":
        """The configuration for a hidden size and an architecture."""
        # Narrow tensors have few tiles: smaller ones spread them better.
        if hidden >= 4096 and hidden % 128 == 0:
            return PerChannelCastAndTransposeConfig(channels=128, rows=16, rows_first=True, halves=1, blocks_per_sm=4)
        return PerChannelCastAndTransposeConfig(channels=64, rows=8, rows_first=False, halves=2, blocks_per_sm=8)


# A thread's guards cover all that it does. With each shared array for one purpose only, the barriers below are enough.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
        "tl.disable_thread_storage_sync": True,
    }
)
def _per_channel_cast_and_transpose_kernel(
    alignment: int,
    hidden: int,
    num_per_tokens: int,
    round_sf: bool,
    config: PerChannelCastAndTransposeConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    rows, channels = config.rows, config.channels
    col_lanes, row_lanes = channels // _VEC, TILE_ROWS // rows
    threads = col_lanes * row_lanes
    col_tiles = ceil_div(hidden, channels)
    load = load_macro(_VEC // 2, 2, alignment)
    take_amax, make_factors, parts_shape = channel_block_macros(
        True, rows, _VEC, channels, num_per_tokens, round_sf, config.halves
    )
    encode = encode_macro("e4m3", rows)
    put_codes, store_tile = transposed_tile_macros(channels, threads)

    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")
    row_tiles = T.ceildiv(num_tokens, TILE_TOKENS)
    grid = (row_tiles, col_tiles) if config.rows_first else (row_tiles * col_tiles, 1)

    @T.prim_func
    def per_channel_cast_and_transpose(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), "bfloat16"),
        out: T.Tensor((hidden, num_tokens), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(*grid, threads=threads) as (first, second):
            # Loads of two bytes need more registers.
            T.annotate_min_blocks_per_sm(config.blocks_per_sm if alignment >= 4 else config.blocks_per_sm // 2)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_TOKENS == 0)
            row_tile = first if config.rows_first else first // col_tiles
            first_col = (second if config.rows_first else first % col_tiles) * channels
            thread = T.get_thread_binding()
            row_lane, lane_col = thread // col_lanes, thread % col_lanes * _VEC
            row, col = row_tile * TILE_TOKENS + row_lane * rows, first_col + lane_col
            inside = col < hidden if hidden % channels else True
            words = T.alloc_local((rows, _VEC // 2), "uint32")
            parts = T.alloc_shared(parts_shape, "uint32")
            factors = T.alloc_shared((TILE_TOKENS // num_per_tokens, channels), "float32")
            tile = T.alloc_shared((channels, TILE_TOKENS // 4), "uint32")

            for i in T.unroll(rows):
                load(x, words, i, row + i, col, inside)
            take_amax(words, parts, row_lane, lane_col)
            T.sync_threads()
            make_factors(parts, factors, sf, row_tile * (TILE_TOKENS // num_per_tokens), first_col, hidden)
            T.sync_threads()

            factor = T.alloc_local((_VEC,), "float32")
            scaled = T.alloc_local((rows,), "float32")
            codes = T.alloc_local((1, rows // 4), "uint32")
            for j in T.vectorized(_VEC):
                factor[j] = factors[row_lane * rows // num_per_tokens, lane_col + j]
            for j in T.unroll(_VEC):
                for i in T.unroll(rows):
                    scaled[i] = element(words, i, j, True) * factor[j]
                encode(scaled, codes)
                put_codes(tile, codes, 0, lane_col + j, row_lane * rows // 4)
            T.sync_threads()
            store_tile(tile, out, first_col, row_tile * TILE_TOKENS, hidden)

    return per_channel_cast_and_transpose


def _reference(x: torch.Tensor, out: torch.Tensor, sf: torch.Tensor, num_per_tokens: int, round_sf: bool) -> None:
    from tk_quant.reference.per_channel.per_channel_cast_and_transpose import per_channel_cast_and_transpose as whole

    new_out, new_sf = whole(x, "e4m3", num_per_tokens, round_sf)
    out.copy_(new_out)
    sf.copy_(new_sf)


@op("tk_quant::per_channel_cast_and_transpose_out", mutates=("out", "sf"), reference=_reference)
def _per_channel_cast_and_transpose_out(
    x: torch.Tensor, out: torch.Tensor, sf: torch.Tensor, num_per_tokens: int, round_sf: bool
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
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
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
    check.multiple_of("x.shape[0]", num_tokens, TILE_TOKENS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check_blocks(fmt, num_per_tokens, round_sf, _SIZES)
    data = x.new_empty((hidden, num_tokens), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _per_channel_cast_and_transpose_out(x, data, sf, num_per_tokens, round_sf)
    return data, sf
