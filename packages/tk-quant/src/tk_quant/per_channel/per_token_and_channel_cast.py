"""per_token_and_channel_cast: quantize along rows and down columns, from one read of x.

What a linear layer's backward pass wants of a gradient or an activation: the cast of `per_token_cast`, blocks of
(1, num_per_channels), for the product over channels, and that of `per_channel_cast`, blocks of (num_per_tokens, 1), or
of `per_channel_cast_and_transpose`, for the product over tokens. For each block of either kind, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 or float32 (num_tokens, hidden); both data float8_e4m3fn, that of channels transposed if wanted.

A thread block takes 128 tokens by 128 channels, a thread 16 bytes of each of some neighbouring tokens, in registers
(lib/channel_tiles.py):

            128 / vec lanes
       ┌────┬────┬─  ─┬─────┐    1. rows: amax by shuffles, a row being within a warp; sf and the factor by one thread
       │ t0 │ t1 │ …  │ t15 │       each, told to all through shared memory
       ├────┼────┼─  ─┼─────┤    2. columns: amax of each thread's, and through shared memory of all threads'; sf and
       │ t16│ …  │    │     │       the factor by one thread each
       ├────┼────┼─  ─┼─────┤    3. the codes of both, those of columns through a tile in shared memory where they are
       │    │    │    │     │       transposed
       └────┴────┴─  ─┴─────┘
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_core.tiles import DIRECT_COPIES
from tk_quant.lib.quantize import TILE_ROWS

_CHANNELS = 128
_GROUPS = (32, 128)
_SECTOR = 8
"""float32 that memory moves at once."""


@dataclass(frozen=True)
class TwoCasts:
    """What a kernel is compiled for, beside its input: the public function's arguments."""

    num_per_channels: int
    num_per_tokens: int
    round_sf: bool
    layout: ScaleLayout
    """Of the scale factors of tokens."""
    transpose: bool


@dataclass(frozen=True)
class PerTokenAndChannelCastConfig:
    """Launch knobs: how much of a tile a thread takes, and how many registers."""

    rows: int
    """Tokens of a thread."""
    vec: int
    """Channels of a thread: 4 or 8."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(itemsize: int, arch: Arch) -> "PerTokenAndChannelCastConfig":
        """The configuration for an element size."""
        # With more tokens a thread, nvcc spills registers.
        if itemsize == 4:
            return PerTokenAndChannelCastConfig(rows=4, vec=4, blocks_per_sm=1)
        return PerTokenAndChannelCastConfig(rows=4, vec=8, blocks_per_sm=2)


@kernel(pass_configs={**DIRECT_COPIES, "tl.enable_lower_ldgstg": True, "tl.disable_shared_memory_reuse": True})
def _per_token_and_channel_cast_kernel(
    hidden: int, dtype: torch.dtype, alignment: int, casts: TwoCasts, config: PerTokenAndChannelCastConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_quant.lib import channel_tiles as tiles
    from tk_quant.lib.scales_io import scale_bytes, scale_of_amax, scale_place, scales_type

    tile = tiles.ChannelTile(_CHANNELS, config.rows, config.vec, casts.num_per_tokens)
    size, layout, round_sf = casts.num_per_channels, casts.layout, casts.round_sf
    groups, num_groups, col_tiles = _CHANNELS // size, ceil_div(hidden, size), ceil_div(hidden, _CHANNELS)
    padding = -num_groups % 4 if layout is ScaleLayout.PACKED_UE8M0 else 0
    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")

    def of_grouped(block: Any, lane: Any, row: Any, group: Any, channel: Any) -> tuple[Any, Any]:
        return tile.of_value(block, lane, row, group * size + channel)

    @T.macro
    def scale_tokens(values: T.Buffer, token_sf: T.Buffer, factors: T.Buffer, row: T.int32, channel: T.int32) -> None:
        """Store sf of a tile's rows, and leave in shared memory what to multiply them by, float32 (rows, groups)."""
        grouped = T.alloc_fragment((*tile.shape[:3], groups, size), T.dtype(dtype))
        T.annotate_layout({grouped: T.Fragment(grouped.shape, forward_fn=of_grouped)})
        of_lanes = T.alloc_fragment((*tile.shape[:3], groups), "int32")
        amax = T.alloc_shared((TILE_ROWS, groups), "int32")
        for b, i, r, g, j in T.Parallel(*grouped.shape):
            grouped[b, i, r, g, j] = values[b, i, r, g * size + j]
        tiles.amax_bits(grouped, of_lanes, 4)
        for b, i, r, g in T.Parallel(*of_lanes.shape):
            amax[tile.token(b, i, r), g] = of_lanes[b, i, r, g]
        places, group = scale_bytes(token_sf, layout), channel // size
        for t, g in T.Parallel(TILE_ROWS, groups):
            sf, factor = scale_of_amax(amax[t, g], "e4m3", round_sf)
            factors[t, g] = factor
            if group + g < num_groups:
                if layout is ScaleLayout.PACKED_UE8M0:
                    exponent = T.cast(T.reinterpret(sf, "uint32") >> T.uint32(23), "uint8")
                    places[scale_place(row + t, group + g, layout)] = exponent
                else:
                    places[scale_place(row + t, group + g, layout)] = sf
        if padding and group + groups >= num_groups:
            for t, k in T.Parallel(TILE_ROWS, padding):
                places[scale_place(row + t, num_groups + k, layout)] = T.uint8(0)

    @T.prim_func
    def per_token_and_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        token_data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        token_sf: scales_type(num_tokens, num_groups, layout),
        channel_data: T.Tensor((hidden, num_tokens) if casts.transpose else (num_tokens, hidden), "float8_e4m3fn"),
        channel_sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_ROWS) * col_tiles, threads=tile.threads) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            # Checked by the op: what vector accesses need to know of the strides.
            T.assume(num_tokens % TILE_ROWS == 0)
            T.assume(row_stride % max(alignment // dtype.itemsize, 1) == 0)
            row_tile, channel = block // col_tiles, block % col_tiles * _CHANNELS
            row = row_tile * TILE_ROWS
            token_factors = T.alloc_shared((TILE_ROWS, groups), "float32")

            # Tiles write parts of the sectors of row-major sf: faster where L2 already holds these.
            if layout is ScaleLayout.ROW_MAJOR and channel % (_SECTOR * size) == 0:
                for t in T.Parallel(TILE_ROWS):
                    prefetch_line(T.access_ptr(token_sf[row + t, channel // size], "r"))
            values = tiles.load_values(x, row, channel, tile)
            scale_tokens(values, token_sf, token_factors, row, channel)
            columns = tiles.columns_of(values, tile)
            factors = tiles.factors_of_blocks(columns, channel_sf, row_tile * tile.blocks, channel, tile, round_sf)
            tiles.store_codes(columns, token_factors, token_data, row, channel, tile, size)
            if casts.transpose:
                tiles.store_transposed_codes(columns, factors, channel_data, row, channel, tile)
            else:
                tiles.store_codes(columns, factors, channel_data, row, channel, tile)

    return per_token_and_channel_cast


def _reference(
    x: torch.Tensor,
    token_data: torch.Tensor,
    token_sf: torch.Tensor,
    channel_data: torch.Tensor,
    channel_sf: torch.Tensor,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    col_major: bool,
) -> None:
    from tk_quant.reference.per_channel.per_token_and_channel_cast import per_token_and_channel_cast as whole

    packed = token_sf.dtype is torch.int32
    groups = (num_per_channels, num_per_tokens)
    by_token, by_channel = whole(x, "e4m3", *groups, round_sf, transpose, col_major, packed)
    for out, result in zip((token_data, token_sf, channel_data, channel_sf), (*by_token, *by_channel)):
        out.copy_(result)


@op(
    "tk_quant::per_token_and_channel_cast_out",
    mutates=("token_data", "token_sf", "channel_data", "channel_sf"),
    reference=_reference,
)
def _per_token_and_channel_cast_out(
    x: torch.Tensor,
    token_data: torch.Tensor,
    token_sf: torch.Tensor,
    channel_data: torch.Tensor,
    channel_sf: torch.Tensor,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    col_major: bool,
) -> None:
    if token_data.numel() == 0:
        return
    arch = get_arch(x.device)
    alignment = check.row_alignment(x)
    layout = scale_layout(col_major, round_sf, token_sf.dtype is torch.int32)
    casts = TwoCasts(num_per_channels, num_per_tokens, round_sf, layout, transpose)
    config = PerTokenAndChannelCastConfig.best(x.dtype.itemsize, arch)
    cast = _per_token_and_channel_cast_kernel(x.shape[1], x.dtype, alignment, casts, config, arch)
    cast(x, token_data, token_sf, channel_data, channel_sf)


@replayable
def _cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose_channel_data: bool,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The public function, its results in a flat tuple."""
    num_tokens, hidden = check.tensor("x", x, (torch.bfloat16, torch.float32), ("num_tokens", "hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check.one_of("fmt", fmt, ("e4m3",))
    for name, value in (("num_per_channels", num_per_channels), ("num_per_tokens", num_per_tokens)):
        check.integer(name, value)
        check.one_of(name, value, _GROUPS)
    for name, flag in (("round_sf", round_sf), ("transpose_channel_data", transpose_channel_data)):
        check.flag(name, flag)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    token_data = x.new_empty((num_tokens, hidden), dtype=torch.float8_e4m3fn)
    token_sf = empty_scales(x, num_tokens, ceil_div(hidden, num_per_channels), layout)
    channel_shape = (hidden, num_tokens) if transpose_channel_data else (num_tokens, hidden)
    channel_data = x.new_empty(channel_shape, dtype=torch.float8_e4m3fn)
    channel_sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _per_token_and_channel_cast_out(
        *(x, token_data, token_sf, channel_data, channel_sf, num_per_channels, num_per_tokens),
        *(round_sf, transpose_channel_data, layout is not ScaleLayout.ROW_MAJOR),
    )
    return token_data, token_sf, channel_data, channel_sf


def per_token_and_channel_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int = 128,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    transpose_channel_data: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Quantize a tensor twice, by blocks of one token and by blocks of one channel, reading it once.

    Bit for bit what `per_token_cast(x, fmt, num_per_channels)` and `per_channel_cast(x, fmt, num_per_tokens)`, or
    `per_channel_cast_and_transpose`, return with the same `round_sf`. For each block: amax = max(max |x|, 1e-4),
    sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf = the least power of two at least amax / 448,
    data = round(x * (1 / sf)). TileKernels has no such op.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_channels: channels of a block of one token, 32 or 128; the last block of a token may be shorter.
        num_per_tokens: tokens of a block of one channel, 32 or 128.
        round_sf: whether scale factors are powers of two.
        transpose_channel_data: whether the data that is quantized by channels is transposed to (hidden, num_tokens).
        use_tma_aligned_col_major_sf: whether the scale factors of tokens are column major, columns on 16 bytes.
        use_packed_ue8m0: whether they are packed exponents, four an int32; needs that flag and `round_sf`.

    Returns:
        `((token_data, token_sf), (channel_data, channel_sf))`: token_data float8_e4m3fn (num_tokens, hidden); token_sf
        float32 (num_tokens, ceil(hidden / num_per_channels)) or packed int32 (num_tokens, a fourth of it), in the
        layout that the flags ask for; channel_data float8_e4m3fn (num_tokens, hidden) or (hidden, num_tokens);
        channel_sf float32 (num_tokens / num_per_tokens, hidden), contiguous. A block with an infinity or a NaN has
        that for sf (packed: 255).

    Raises:
        TypeError: x is no bfloat16 or float32 tensor, or a flag or a size of blocks has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            a size of blocks is none of those above; `use_packed_ue8m0` comes without the flags that it needs.
    """
    flags = (round_sf, transpose_channel_data, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    token_data, token_sf, channel_data, channel_sf = _cast(x, fmt, num_per_channels, num_per_tokens, *flags)
    return (token_data, token_sf), (channel_data, channel_sf)
