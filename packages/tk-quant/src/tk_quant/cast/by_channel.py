"""Casts by blocks of one channel: the kernel of per_channel_cast and its relatives, and its launch.

A thread block takes a tile of 128 rows by `channels` channels. A thread loads `vec` channels of `rows` neighbouring
rows once and keeps them in registers. Threads exchange two things through shared memory:

              channels / vec lanes
               ┌────┬────┬─  ─┬─────┐       1. amax of each thread's channels
     row lanes │ t0 │ t1 │ …  │ t15 │       2. the factor of each channel; one or two threads make it, and sf, from
     × rows    ├────┼────┼─  ─┼─────┤          the channel's 128 / rows amax
               │ t16│ …  │    │     │
               └────┴────┴─  ─┴─────┘       A warp reads and writes at least 64 bytes of a row at once.

To transpose data, the codes also go through a tile in shared memory, from which 8 lanes store 128 tokens of a channel.
The codes of a pair are kept in shared memory until the factors are known, and are decoded twice: float32 values would
take four times the space, and latency is hidden by many warps.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_device_num_sms
from tk_core.tiles import DIRECT_COPIES
from tk_quant.cast import gathered_recast
from tk_quant.cast.config import TILE_ROWS, CastInput
from tk_quant.cast.format import least_amax_of

PAIR_CHANNELS = 128
"""Channels of a block of a pair."""
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.enable_lower_ldgstg": True, "tl.disable_shared_memory_reuse": True}


def _tile(itemsize: int, hidden: int, transpose: bool, gathered: bool) -> tuple[int, int, int, int, bool]:
    """(channels of a tile, rows and channels of a thread, thread blocks that have to fit on an SM, rows_first).

    rows_first: whether neighbouring thread blocks take neighbouring rows, rather than neighbouring channels. The thread
    blocks of an SM cap registers.
    """
    # H200, 8192 x 7168: bfloat16 with 3 blocks 42.9 µs, with 16 rows 42.8; float32 with 3 blocks 74.6; pairs with
    # 8 rows x 16 channels a thread 39.2, with 4 x 16 41.6.
    if itemsize == 1 and gathered:
        # H100: 512 rows of 7168 4.06 µs, with 128 channels 4.07, not rows_first 4.13; 544 rows 4.35, 4.86, 4.35;
        # 34816 rows of 640 not rows_first 14.1, with 128 channels 14.9, rows_first 14.8.
        return 64, 8, 8, 6, hidden >= 4096
    if itemsize == 1:
        return 128, 8, 8, 3, False
    if itemsize == 4:
        return 128, 8, 4, 2, gathered  # 69.4 µs
    if not transpose:
        return 128, 8, 8, 4, gathered  # 42.7 µs
    # Narrow tensors have few tiles: smaller ones spread better over SMs. With more blocks per SM nvcc spills.
    if hidden >= 4096 and hidden % 128 == 0:
        return 128, 16, 8, 3, True
    return 64, 8, 8, 5, False


@kernel(pass_configs=_PASS_CONFIGS)
def per_channel_cast_kernel(
    source: CastInput,
    hidden: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    gathered: bool,
    packed: bool,
    arch: Arch,
) -> Any:
    """Build `per_channel_cast(x, x_sf, pos_to_token, out, sf, least_amax)`; None for a missing tensor.

    With `transpose`, out is (hidden, num_rows); with `packed`, a word of sf has the exponents of four blocks of tokens.
    In a pair, the channels of a tile share one scale factor per token.
    """
    import tilelang.language as T

    from tk_quant.cast import channel_tile as tiles

    dtype = source.dtype
    channels, rows, vec, blocks_per_sm, rows_first = _tile(dtype.itemsize, hidden, transpose, gathered)
    tile = tiles.ChannelTile(channels, rows, vec, num_per_tokens)
    col_tiles = ceil_div(hidden, channels)
    num_tokens, num_rows, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_rows"), T.dynamic("num_blocks")
    row_stride, x_rows = T.dynamic("row_stride", "int64"), num_tokens if gathered else num_rows
    row_tiles = T.ceildiv(num_rows, TILE_ROWS)
    grid = (row_tiles, col_tiles) if rows_first else (row_tiles * col_tiles, 1)

    @T.macro
    def load_row_sf(x_sf: T.Buffer, row_sf: T.Buffer, tokens: Any, row: T.int32, col: T.int32) -> None:
        for b, i, r in T.Parallel(*row_sf.shape):
            if gathered:
                row_sf[b, i, r] = T.if_then_else(tokens[b, i, r] >= 0, x_sf[tokens[b, i, r], col], T.float32(0))
            else:
                row_sf[b, i, r] = x_sf[row + tile.token(b, i, r), col]

    @T.macro
    def dequantize(codes: T.Buffer, row_sf: T.Buffer) -> T.Buffer:
        """Decode a tile's codes and multiply them by the sf of their rows: float32, with a thread's rows adjacent."""
        decoded = tiles.fragment(tile.shape, "float32", tile.of_value)
        columns = tiles.fragment(tile.shape_of_columns, "float32", tile.of_column)
        T.copy(codes, decoded)
        for b, i, r, j in T.Parallel(*tile.shape):
            columns[b, i, j, r] = decoded[b, i, r, j] * row_sf[b, i, r]
        return columns

    @T.prim_func
    def per_channel_cast(
        x: T.StridedTensor((x_rows, hidden), (row_stride, 1), T.dtype(dtype)),
        x_sf: T.Tensor((x_rows, ceil_div(hidden, PAIR_CHANNELS)), "float32"),
        pos_to_token: T.Tensor((num_rows,), "int32"),
        out: T.Tensor((hidden, num_rows) if transpose else (num_rows, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "int32" if packed else "float32"),
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(*grid, threads=tile.threads) as (first, second):
            # Loads of two bytes need more registers.
            is_narrow = source.alignment < 4 and not source.is_pair
            T.annotate_min_blocks_per_sm(blocks_per_sm // (2 if is_narrow else 1))
            # The op has checked these; vector accesses need to know.
            T.assume(row_stride % max(source.alignment // dtype.itemsize, 1) == 0)
            T.assume(num_rows % (16 if gathered else TILE_ROWS) == 0)
            row_tile = first if rows_first else first // col_tiles
            col_tile = second if rows_first else first % col_tiles
            row, channel = row_tile * TILE_ROWS, col_tile * channels
            tokens = tiles.find_tokens(pos_to_token, row, num_tokens, tile) if gathered else None
            row_sf = T.alloc_fragment(tile.shape[:3], "float32")
            if source.is_pair:
                load_row_sf(x_sf, row_sf, tokens, row, channel // PAIR_CHANNELS)
            if gathered:
                values = tiles.gather_values(x, tokens, channel, tile)
            else:
                values = tiles.load_values(x, row, channel, tile)
            if source.is_pair:
                kept = T.alloc_shared((TILE_ROWS, channels), "float8_e4m3fn")
                for b, i, r, j in T.Parallel(*tile.shape):
                    kept[tile.token(b, i, r), j] = values[b, i, r, j]
                columns = dequantize(values, row_sf)
                options = (least_amax, tile, round_sf, num_rows // num_per_tokens if packed else None)
                factors = tiles.factors_of_blocks(columns, sf, row_tile * tile.blocks, channel, *options)
                again = dequantize(tiles.load_values(kept, 0, 0, tile), row_sf)
                tiles.store_by_channel(again, factors, out, row, channel, tile, transpose)
            else:
                columns = tiles.columns_of(values, tile)
                first_block = row_tile * tile.blocks
                options = (least_amax, tile, round_sf, num_rows // num_per_tokens if packed else None)
                factors = tiles.factors_of_blocks(columns, sf, first_block, channel, *options)
                tiles.store_by_channel(columns, factors, out, row, channel, tile, transpose)

    return per_channel_cast


def launch_per_channel_cast(
    x: Tensor,
    x_sf: Tensor | None,
    pos_to_token: Tensor | None,
    out: Tensor,
    sf: Tensor,
    round_sf: bool,
    sf_clamp_min: float | None,
    num_per_tokens: int = TILE_ROWS,
) -> None:
    """Launch the kernel, or that of gathered_recast.py where it is faster."""
    arch, hidden, gathered = get_arch(x.device), x.shape[1], pos_to_token is not None
    source = CastInput.of(x, x_sf, (1, PAIR_CHANNELS))
    if x_sf is not None and gathered:
        num_sms = get_device_num_sms(x.device)
        # That kernel multiplies a row's number by a stride of 32 bits.
        is_near = x.stride(0) < 2**32
        if is_near and gathered_recast.is_fastest(out.shape[0], hidden, source.alignment, num_sms, arch):
            prefetched = gathered_recast.prefetched_columns(out.shape[0], x.shape[0], hidden, num_sms)
            gathered_recast.gathered_recast_kernel(hidden, check.row_alignment(x_sf), round_sf, arch)(
                x, x_sf, pos_to_token, out, sf, least_amax_of("e4m3", sf_clamp_min), num_sms, *prefetched
            )
            return
    packed = sf.dtype is torch.int32
    cast = per_channel_cast_kernel(source, hidden, num_per_tokens, round_sf, False, gathered, packed, arch)
    cast(x, x_sf, pos_to_token, out, sf, least_amax_of("e4m3", sf_clamp_min))
