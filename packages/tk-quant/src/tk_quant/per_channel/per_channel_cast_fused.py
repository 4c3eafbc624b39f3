"""per_channel_cast_fused: quantize each channel by blocks of 128 rows, of x, of a pair, or of gathered rows of either.

For each channel of each block of 128 rows (the last block of gathered rows may be shorter), in float32:

    value[p] = x[p], or data[p] * sf[p] of a pair;   with pos_to_token, of row pos_to_token[p], or 0 where there is none
    amax = max(max |value|, 1e-4);   sf = amax / 448;   data = round(value * (448 / amax))
    with round_sf:    sf = least power of two >= that quotient;   data = round(value * (1 / sf))

x (num_tokens, hidden), bfloat16, float32, or float8_e4m3fn beside float32 (num_tokens, hidden / 128);
data float8_e4m3fn (num_rows, hidden), sf float32 (ceil(num_rows / 128), hidden).

Tensors go through the kernel of per_channel_cast, their gathered rows through that of gathered_cast, and those of
pairs, unless they are few, through that of gathered_recast. The kernel here is for other pairs, and goes like the
first: a thread has `rows` neighbouring rows of `vec` channels, the threads of a block 128 rows of 128 channels. But
codes wait in shared memory for the factors and are converted twice: float32 values would take four times the room, and
what hides the latencies here is many warps.
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
from tk_core.num_sms import get_device_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.lib import gathered_recast
from tk_quant.lib.check_pairs import pair_of
from tk_quant.lib.quantize import TILE_ROWS
from tk_quant.per_channel.per_channel_cast import PASS_CONFIGS, check_blocks, check_plain_cast, per_channel_cast_out

_GROUP = 128


@dataclass(frozen=True)
class PerChannelRecastConfig:
    """Launch knobs of the kernel for pairs: how much of a tile of 128 channels a thread takes, and which is next."""

    rows: int
    """Rows of a thread: 4, 8 or 16."""
    vec: int
    """Channels of a thread: 4, 8 or 16."""
    rows_first: bool
    """Whether neighbouring blocks take neighbouring rows, rather than channels."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(gathered: bool, arch: Arch) -> "PerChannelRecastConfig":
        """The configuration for gathered rows or not, and an architecture."""
        # H200: 8192 x 7168 32.4 µs, with (8, 16) 39.2, (4, 16) 41.6; 4096 to 34816 rows of 640 14.3, (4, 16) 16.4.
        return PerChannelRecastConfig(rows=8, vec=16 if gathered else 8, rows_first=gathered, blocks_per_sm=3)


@kernel(pass_configs=PASS_CONFIGS)
def _per_channel_recast_kernel(
    alignment: int, hidden: int, gathered: bool, round_sf: bool, config: PerChannelRecastConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_quant.lib import channel_tiles as tiles

    tile, col_tiles = tiles.ChannelTile(_GROUP, config.rows, config.vec, TILE_ROWS), hidden // _GROUP
    num_tokens, num_rows, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_rows"), T.dynamic("num_blocks")
    row_stride, x_rows = T.dynamic("row_stride"), num_tokens if gathered else num_rows
    map_type = T.Tensor((num_rows,), "int32") if gathered else T.int32
    row_tiles = T.ceildiv(num_rows, TILE_ROWS)
    grid = (row_tiles, col_tiles) if config.rows_first else (row_tiles * col_tiles, 1)

    @T.macro
    def dequantize(codes: T.Buffer, row_sf: T.Buffer) -> T.Buffer:
        """float32 columns of a tile's codes."""
        decoded = T.alloc_fragment(tile.shape, "float32")
        columns = T.alloc_fragment(tile.shape_of_columns, "float32")
        T.annotate_layout({decoded: T.Fragment(decoded.shape, forward_fn=tile.of_value)})
        T.annotate_layout({columns: T.Fragment(columns.shape, forward_fn=tile.of_column)})
        T.copy(codes, decoded)
        for b, i, j, r in T.Parallel(*columns.shape):
            columns[b, i, j, r] = decoded[b, i, r, j] * row_sf[b, i, r]
        return columns

    @T.prim_func
    def per_channel_recast(
        x: T.StridedTensor((x_rows, hidden), (row_stride, 1), "float8_e4m3fn"),
        x_sf: T.Tensor((x_rows, col_tiles), "float32"),
        pos_to_token: map_type,
        out: T.Tensor((num_rows, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(*grid, threads=tile.threads) as (first, second):
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            # Checked by the op.
            T.assume(row_stride % alignment == 0)
            T.assume(num_rows % (16 if gathered else TILE_ROWS) == 0)
            row_tile = first if config.rows_first else first // col_tiles
            group = second if config.rows_first else first % col_tiles
            row, channel = row_tile * TILE_ROWS, group * _GROUP
            row_sf = T.alloc_fragment(tile.shape[:3], "float32")
            kept = T.alloc_shared((TILE_ROWS, _GROUP), "float8_e4m3fn")
            if gathered:
                tokens = tiles.find_tokens(pos_to_token, row, num_tokens, tile)
                for b, i, r in T.Parallel(*row_sf.shape):
                    row_sf[b, i, r] = T.if_then_else(tokens[b, i, r] >= 0, x_sf[tokens[b, i, r], group], T.float32(0))
                codes = tiles.gather_values(x, tokens, channel, tile)
            else:
                for b, i, r in T.Parallel(*row_sf.shape):
                    row_sf[b, i, r] = x_sf[row + tile.token(b, i, r), group]
                codes = tiles.load_values(x, row, channel, tile)
            for b, i, r, j in T.Parallel(*tile.shape):
                kept[tile.token(b, i, r), j] = codes[b, i, r, j]
            factors = tiles.factors_of_blocks(dequantize(codes, row_sf), sf, row_tile, channel, tile, round_sf)
            again = tiles.load_values(kept, 0, 0, tile)
            tiles.store_by_channel(dequantize(again, row_sf), factors, out, row, channel, tile, False)

    return per_channel_recast


@op(
    "tk_quant::per_channel_recast_out",
    mutates=("out", "sf"),
    reference="per_channel_cast_fused",
    translate=lambda call: {
        "x": (call.x, call.x_sf),
        "fmt": "e4m3",
        "num_per_tokens": TILE_ROWS,
        "num_per_channels": _GROUP,
    },
)
def _per_channel_recast_out(
    x: Tensor, x_sf: Tensor, pos_to_token: Tensor | None, out: Tensor, sf: Tensor, round_sf: bool
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    hidden, alignment, gathered = x.shape[1], check.row_alignment(x), pos_to_token is not None
    num_sms = get_device_num_sms(x.device)
    if gathered and gathered_recast.is_fastest(out.shape[0], hidden, alignment, num_sms, arch):
        prefetched = gathered_recast.prefetched_columns(out.shape[0], x.shape[0], hidden, num_sms)
        gathered_recast.gathered_recast_kernel(hidden, check.row_alignment(x_sf), round_sf, arch)(
            x, x_sf, pos_to_token, out, sf, num_sms, *prefetched
        )
        return
    config = PerChannelRecastConfig.best(gathered, arch)
    _per_channel_recast_kernel(alignment, hidden, gathered, round_sf, config, arch)(
        x, x_sf, pos_to_token if gathered else 0, out, sf
    )


@replayable
def per_channel_cast_fused(
    x: Tensor | tuple[Tensor, Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel: of a tensor, of what a pair stands for, or of gathered rows of either.

    value[p] = x[p], or for a pair data[p] * sf[p] rounded to float32; with `pos_to_token`, of row pos_to_token[p], and
    0 where that is negative. For each channel of each 128 rows: amax = max(max |value|, 1e-4), sf = amax / 448,
    data = round(value * (448 / amax)); with `round_sf`: sf = the least power of two at least amax / 448,
    data = round(value * (1 / sf)). Name, arguments and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden), hidden a multiple of 64; or a pair `(data, sf)`, float8_e4m3fn
            (num_tokens, hidden) and contiguous float32 (num_tokens, hidden / 128), hidden a multiple of 128. Rows of x
            or of data may be strided.
        fmt: "e4m3".
        num_per_tokens: 128, rows of a block.
        round_sf: whether scale factors are powers of two.
        num_per_channels: 128 for a pair, channels of a block of it; None otherwise.
        pos_to_token: int32 (num_rows,), the row of x that a row of the result comes from; negative for none, and an
            index past the last row counts as that (`TK_DEBUG=1` raises ValueError). num_rows is a multiple of 16.
            Without it num_rows is num_tokens, a multiple of 128.

    Returns:
        data float8_e4m3fn (num_rows, hidden) and sf float32 (ceil(num_rows / 128), hidden), both contiguous. A block
        with an infinity or a NaN has that for sf.

    Raises:
        TypeError: x is none of these, or an argument has another type or dtype.
        ValueError: a shape, stride or device is not as described; fmt, num_per_tokens or num_per_channels is none of
            those above.
    """
    x_sf = None
    if isinstance(x, tuple | list):
        x, x_sf = pair_of("x", x)
        num_tokens, hidden = check.tensor("x[0]", x, (torch.float8_e4m3fn,), ("num_tokens", "hidden"), layout="rows")
        check.require(hidden > 0 and hidden % _GROUP == 0, "x[0].shape[1]", f"a positive multiple of {_GROUP}", hidden)
        check.tensor("x[1]", x_sf, (torch.float32,), (num_tokens, hidden // _GROUP), device=x.device)
        check.one_of("num_per_channels", num_per_channels, (_GROUP,))
        check_blocks(fmt, num_per_tokens, round_sf)
    else:
        num_tokens, hidden = check_plain_cast(x, fmt, num_per_tokens, round_sf)
        check.require(num_per_channels is None, "num_per_channels", "None, for x is no pair", num_per_channels)
    num_rows = num_tokens
    if pos_to_token is None:
        check.multiple_of("rows of x", num_rows, TILE_ROWS)
    else:
        (num_rows,) = check.tensor("pos_to_token", pos_to_token, (torch.int32,), ("num_rows",), device=x.device)
        check.multiple_of("pos_to_token.shape[0]", num_rows, 16)
        check.below("pos_to_token", pos_to_token, num_tokens, f"indices below {num_tokens}")
    out = x.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((ceil_div(num_rows, TILE_ROWS), hidden), dtype=torch.float32)
    if x_sf is None:
        per_channel_cast_out(x, pos_to_token, out, sf, round_sf)
    else:
        _per_channel_recast_out(x, x_sf, pos_to_token, out, sf, round_sf)
    return out, sf
