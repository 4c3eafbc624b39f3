"""per_token_and_channel_cast: quantize along rows and down columns, from one read of x.

What a linear layer's backward pass wants of a gradient or an activation: the cast of `per_token_cast`, blocks of
(1, num_per_channels), for the product over channels, and that of `per_channel_cast`, blocks of (num_per_tokens, 1), or
of `per_channel_cast_and_transpose`, for the product over tokens. For each block of either kind, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 or float32 (num_tokens, hidden); both data float8_e4m3fn, that of channels transposed if wanted.

A thread block takes 128 tokens by 128 channels, as per_channel_cast.py pictures it, and keeps them in registers. Maxima
of tokens are found among neighbouring lanes, those of channels meet in shared memory.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.lib.quantize import TILE_ROWS
from tk_quant.per_channel.per_channel_cast import PASS_CONFIGS

_CHANNELS = 128
_GROUPS = (32, 128)


@kernel(pass_configs=PASS_CONFIGS)
def _per_token_and_channel_cast_kernel(
    hidden: int,
    dtype: torch.dtype,
    alignment: int,
    sizes: tuple[int, int],
    layout: ScaleLayout,
    round_sf: bool,
    transpose: bool,
    arch: Arch,
) -> Any:
    """`sizes`: num_per_channels and num_per_tokens; `layout`: of the scale factors of tokens."""
    import tilelang.language as T

    from tk_quant.lib import channel_tiles as tiles
    from tk_quant.lib.scales_io import scale_bytes, scale_of_amax, scale_place, scales_type

    num_per_channels, num_per_tokens = sizes
    # H200, 8192 x 7168: bfloat16 80.7 us, with 4 rows a thread 85.9, with 4 channels 89.8; float32 105.2.
    tile = tiles.ChannelTile(_CHANNELS, 8, 16 // dtype.itemsize, num_per_tokens)
    num_groups, groups = ceil_div(hidden, num_per_channels), _CHANNELS // num_per_channels
    packed = layout is ScaleLayout.PACKED_UE8M0
    num_written = align(num_groups, 4) if packed else num_groups
    col_tiles = ceil_div(num_written, groups)
    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")

    @T.macro
    def cast_rows(values: T.Buffer, data: T.Buffer, sf: T.Buffer, row: T.int32, channel: T.int32) -> None:
        """The codes and scale factors of a tile's tokens."""
        shape = (*tile.shape[:3], groups)
        grouped = T.alloc_fragment((*shape, num_per_channels), values.dtype)
        T.annotate_layout(
            {grouped: T.Fragment(grouped.shape, lambda b, i, r, g, j: tile.of_value(b, i, r, g * num_per_channels + j))}
        )
        amax, factors = T.alloc_fragment(shape, "int32"), T.alloc_fragment(shape, "float32")
        scaled, places = T.alloc_fragment(tile.shape, "float32"), scale_bytes(sf, layout)
        T.annotate_layout({scaled: T.Fragment(scaled.shape, tile.of_value)})
        for b, i, r, g, j in T.Parallel(*grouped.shape):
            grouped[b, i, r, g, j] = values[b, i, r, g * num_per_channels + j]
        tiles.amax_bits(grouped, amax, 4)
        for b, i, r, g in T.Parallel(*shape):
            scale, factors[b, i, r, g] = scale_of_amax(amax[b, i, r, g], "e4m3", round_sf)
            group = channel // num_per_channels + g
            if group < num_written:
                place = scale_place(row + tile.token(b, i, r), group, layout)
                if packed:
                    byte = T.cast(T.reinterpret(scale, "uint32") >> T.uint32(23), "uint8")
                    places[place] = T.if_then_else(group < num_groups, byte, T.uint8(0))
                else:
                    places[place] = scale
        for b, i, r, j in T.Parallel(*tile.shape):
            scaled[b, i, r, j] = T.cast(values[b, i, r, j], "float32") * factors[b, i, r, j // num_per_channels]
        tiles.store_codes(scaled, data, row, channel, tile)

    @T.prim_func
    def per_token_and_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        token_data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        token_sf: scales_type(num_tokens, num_groups, layout),
        channel_data: T.Tensor((hidden, num_tokens) if transpose else (num_tokens, hidden), "float8_e4m3fn"),
        channel_sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_ROWS) * col_tiles, threads=tile.threads) as block:
            # Loads of two bytes and float32 need more registers, and nvcc for sm_100a more than for sm_90a.
            T.annotate_min_blocks_per_sm(2 if dtype is torch.bfloat16 and alignment >= 4 and arch.sm < 100 else 1)
            # Checked by the op: what vector accesses need to know of the strides.
            T.assume(row_stride % max(alignment // dtype.itemsize, 1) == 0)
            T.assume(num_tokens % TILE_ROWS == 0)
            row, channel = block // col_tiles * TILE_ROWS, block % col_tiles * _CHANNELS
            values = tiles.load_values(x, row, channel, tile)
            cast_rows(values, token_data, token_sf, row, channel)
            columns = tiles.columns_of(values, tile)
            factors = tiles.factors_of_blocks(columns, channel_sf, row // num_per_tokens, channel, tile, round_sf)
            tiles.store_by_channel(columns, factors, channel_data, row, channel, tile, transpose)

    return per_token_and_channel_cast


@op(
    "tk_quant::per_token_and_channel_cast_out",
    mutates=("token_data", "token_sf", "channel_data", "channel_sf"),
    reference="per_token_and_channel_cast",
    translate=lambda call: {
        "fmt": "e4m3",
        "transpose_channel_data": call.transpose,
        "use_tma_aligned_col_major_sf": call.col_major,
        "use_packed_ue8m0": call.token_sf.dtype is torch.int32,
    },
)
def _per_token_and_channel_cast_out(
    x: Tensor,
    token_data: Tensor,
    token_sf: Tensor,
    channel_data: Tensor,
    channel_sf: Tensor,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    col_major: bool,
) -> None:
    if token_data.numel() == 0:
        return
    layout = scale_layout(col_major, round_sf, token_sf.dtype is torch.int32)
    cast = _per_token_and_channel_cast_kernel(
        *(x.shape[1], x.dtype, check.row_alignment(x), (num_per_channels, num_per_tokens)),
        *(layout, round_sf, transpose, get_arch(x.device)),
    )
    cast(x, token_data, token_sf, channel_data, channel_sf)


@replayable
def _cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose_channel_data: bool,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    x: Tensor,
    fmt: str,
    num_per_channels: int = 128,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    transpose_channel_data: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
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
