"""per_token_and_channel_cast: quantize along rows and down columns, from one read of x.

What a linear layer's backward pass wants of a gradient or an activation: the cast of `per_token_cast`, blocks of
(1, num_per_channels), for the product over channels, and that of `per_channel_cast`, blocks of (num_per_tokens, 1), or
of `per_channel_cast_and_transpose`, for the product over tokens. For each block of either kind, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 or float32 (num_tokens, hidden); both data float8_e4m3fn, that of channels transposed if wanted.

A block takes 128 tokens by 128 channels, a warp 8 or 16 of the tokens, a thread four channels of these, in registers.

                    32 lanes x 4 channels
              ┌────┬────┬────┬─  ─┬─────┐    1. columns: amax of each thread's channels, told through shared memory
       warp 0 │ t0 │ t1 │ t2 │    │ t31 │    2. rows, by eights: within the warp, until lane % 8 has amax, sf and the
              ├────┼────┼────┼─  ─┼─────┤       factor of that row in its group; four codes a lane, 128 bytes a row
       warp 1 │    │    │    │    │     │    3. columns: one thread for each in a block makes sf and the factor
              ├────┼────┼────┼─  ─┼─────┤    4. their codes, like those of rows or through a tile in shared memory that
          …   │    │    │    │    │     │       is read the other way: eight lanes store 128 tokens of a channel
              └────┴────┴────┴─  ─┴─────┘
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.device.division import scale_of_amax
from tk_quant.device.fp8 import store_exponent
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.device.row_amax import row_amax
from tk_quant.lib.column_factors import LEAST_AMAX, ColumnFactors
from tk_quant.lib.quantize import OWN_GUARDS_AND_BARRIERS, element, encode_macro, load_macro
from tk_quant.lib.transposed_tile import TILE_TOKENS, transposed_tile_macros

_CHANNELS = 128
_ROWS = 8
"""Of a warp at once."""
_VEC = 4
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
    """Rows of a warp: 8 or 16."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(itemsize: int, num_per_channels: int, alignment: int, arch: Arch) -> "PerTokenAndChannelCastConfig":
        """The configuration for an element size, a row's blocks and what the address of every row is a multiple of."""
        if itemsize == 2 and num_per_channels == 128 and alignment >= 4:
            # Three tiles at a time fit the registers so, with eight rows two.
            return PerTokenAndChannelCastConfig(rows=16, blocks_per_sm=3)
        # Loads of two bytes need more registers than the 64 that two blocks leave each thread.
        return PerTokenAndChannelCastConfig(rows=8, blocks_per_sm=2 if alignment >= 4 else 1)


def _cast_rows_macro(hidden: int, is_bf16: bool, casts: TwoCasts, rows: int) -> Any:
    """Macro `cast_rows(words, token_data, token_sf, row, first_col, inside)`, of a warp's `rows` rows."""
    import tilelang.language as T

    num_words = _VEC // 2 if is_bf16 else _VEC
    num_per_channels, packed = casts.num_per_channels, casts.layout is ScaleLayout.PACKED_UE8M0
    group_lanes, num_groups = num_per_channels // _VEC, ceil_div(hidden, num_per_channels)
    larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32
    encode = encode_macro("e4m3", _VEC)

    @T.macro
    def cast_rows(
        words: T.Buffer, token_data: T.Buffer, token_sf: T.Buffer, row: T.int32, first_col: T.int32, inside: T.bool
    ) -> None:
        """The codes and scale factors of a warp's rows, from `row` on."""
        lane = T.get_thread_binding() % 32
        magnitudes = T.alloc_local((_ROWS,), "uint32")
        scale = T.alloc_local((2,), "uint32")
        across = T.alloc_local((_VEC,), "float32")
        code = T.alloc_local((1,), "uint32")
        factor = T.alloc_var("float32")
        amax = T.alloc_var("int32")
        col = first_col + lane * _VEC
        for part in T.unroll(rows // _ROWS):
            for i in T.unroll(_ROWS):
                magnitudes[i] = T.uint32(0)
                for j in T.unroll(num_words):
                    magnitudes[i] = larger_magnitude(magnitudes[i], words[part * _ROWS + i, j])
            amax = row_amax(T.address_of(magnitudes[0]), is_bf16, group_lanes)
            scale_of_amax(T.max(amax, LEAST_AMAX), T.address_of(scale[0]), T.address_of(scale[1]), casts.round_sf)
            token, group = row + part * _ROWS + lane % _ROWS, first_col // num_per_channels + lane // group_lanes
            if lane % group_lanes < _ROWS and (group < num_groups if hidden % _CHANNELS else True):
                if packed:
                    store_exponent(T.access_ptr(token_sf[token, group // 4], "w"), group % 4, scale[0])
                    if group == num_groups - 1:
                        for i in T.unroll(-num_groups % 4):
                            index = num_groups + i
                            store_exponent(T.access_ptr(token_sf[token, index // 4], "w"), index % 4, T.uint32(0))
                else:
                    token_sf[token, group] = T.reinterpret(scale[0], "float32")
            for i in T.unroll(_ROWS):
                factor = T.reinterpret(T.shfl_sync(scale[1], lane // 8 * 8 + i), "float32")
                for j in T.unroll(_VEC):
                    across[j] = element(words, part * _ROWS + i, j, is_bf16) * factor
                encode(across, code)
                if inside:
                    T.stg32(token_data[row + part * _ROWS + i, col], code[0])

    return cast_rows


# Thread level: on an H200, 8192 x 7168 bfloat16 take 62 to 65 µs so, at the tile level 73 to 86.
# Each access has what guard it needs. With each shared array for one purpose only, the barriers below are enough.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def _per_token_and_channel_cast_kernel(
    hidden: int, dtype: torch.dtype, alignment: int, casts: TwoCasts, config: PerTokenAndChannelCastConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    is_bf16 = dtype is torch.bfloat16
    per_word = 2 if is_bf16 else 1
    num_words = _VEC // per_word
    rows = config.rows
    num_warps = TILE_TOKENS // rows
    threads = num_warps * 32
    num_per_channels, num_per_tokens, transpose = casts.num_per_channels, casts.num_per_tokens, casts.transpose
    col_blocks, col_lanes = TILE_TOKENS // num_per_tokens, num_per_tokens // rows
    columns = ColumnFactors(dtype, _CHANNELS, col_blocks, col_lanes, threads, hidden, casts.round_sf)
    share_amax, make_factors = columns.macros()
    num_groups = ceil_div(hidden, num_per_channels)
    col_tiles = ceil_div(hidden, _CHANNELS)
    is_ragged = hidden % _CHANNELS != 0
    packed, is_row_major = casts.layout is ScaleLayout.PACKED_UE8M0, casts.layout is ScaleLayout.ROW_MAJOR
    load = load_macro(num_words, per_word, alignment)
    put_codes, store_tile = transposed_tile_macros(_CHANNELS, threads, _VEC)
    cast_rows = _cast_rows_macro(hidden, is_bf16, casts, rows)
    encode_row, encode_column = encode_macro("e4m3", _VEC), encode_macro("e4m3", rows)

    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")
    sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    token_sf_shape = (num_tokens, ceil_div(num_groups, 4) if packed else num_groups)
    channel_shape = (hidden, num_tokens) if transpose else (num_tokens, hidden)

    @T.prim_func
    def per_token_and_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        token_data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        token_sf: T.StridedTensor(token_sf_shape, (sf_row_stride, sf_col_stride), "int32" if packed else "float32"),
        channel_data: T.Tensor(channel_shape, "float8_e4m3fn"),
        channel_sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_TOKENS) * col_tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_TOKENS == 0)
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            # Variables, so that the block is divided by once, in 32 bits.
            first_token, first_col = T.alloc_var("int32"), T.alloc_var("int32")
            first_token, first_col = block // col_tiles * TILE_TOKENS, block % col_tiles * _CHANNELS
            row, lane_col = warp * rows, lane * _VEC
            inside = first_col + lane_col < hidden if is_ragged else True
            words = T.alloc_local((rows, num_words), "uint32")
            parts = T.alloc_shared((num_warps, _CHANNELS // per_word), "uint32")
            factors = T.alloc_shared((col_blocks, _CHANNELS), "float32")
            tile_codes = T.alloc_shared((_CHANNELS, TILE_TOKENS // 4) if transpose else (1, 4), "uint32")
            factor = T.alloc_local((_VEC,), "float32")
            across = T.alloc_local((_VEC,), "float32")
            code = T.alloc_local((1,), "uint32")
            down = T.alloc_local((rows,), "float32")
            codes = T.alloc_local((1, rows // 4), "uint32")

            # Tiles write parts of the sectors of row-major sf: faster where L2 already holds these.
            if is_row_major and thread < TILE_TOKENS and first_col % (_SECTOR * num_per_channels) == 0:
                prefetch_line(T.address_of(token_sf[first_token + thread, first_col // num_per_channels]))
            for i in T.unroll(rows):
                load(x, words, i, first_token + row + i, first_col + lane_col, inside)
            share_amax(words, parts, warp, lane * num_words)
            cast_rows(words, token_data, token_sf, first_token + row, first_col, inside)
            T.sync_threads()
            make_factors(parts, factors, channel_sf, first_token // num_per_tokens, first_col)
            T.sync_threads()
            for j in T.vectorized(_VEC):
                factor[j] = factors[row // num_per_tokens, lane_col + j]
            if transpose:
                for j in T.unroll(_VEC):
                    for i in T.unroll(rows):
                        down[i] = element(words, i, j, is_bf16) * factor[j]
                    encode_column(down, codes)
                    put_codes(tile_codes, codes, 0, lane_col + j, warp * (rows // 4))
                T.sync_threads()
                store_tile(tile_codes, channel_data, first_col, first_token, hidden)
            else:
                for i in T.unroll(rows):
                    for j in T.unroll(_VEC):
                        across[j] = element(words, i, j, is_bf16) * factor[j]
                    encode_row(across, code)
                    if inside:
                        T.stg32(channel_data[first_token + row + i, first_col + lane_col], code[0])

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
    arch = get_arch(x.device)
    alignment = check.row_alignment(x)
    config = PerTokenAndChannelCastConfig.best(x.dtype.itemsize, num_per_channels, alignment, arch)
    layout = scale_layout(col_major, round_sf, token_sf.dtype is torch.int32)
    casts = TwoCasts(num_per_channels, num_per_tokens, round_sf, layout, transpose)
    cast = _per_token_and_channel_cast_kernel(x.shape[1], x.dtype, alignment, casts, config, arch)
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
    check.multiple_of("x.shape[0]", num_tokens, TILE_TOKENS)
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
