"""Steps of the cast kernels on a tile: lay it out, load its values, find the amax of its blocks.

A tile is a fragment (blocks down, tokens of a block, blocks across, channels of a block). A thread holds vectors of
`vec` neighbouring channels: one, or those of several tokens or blocks if the tile has more vectors than threads.
Kernels import this module in their builder, as it imports TileLang.
"""

from math import gcd
from typing import Any

import tilelang.language as T

from tk_core.macros.quantize import MAGNITUDE_BITS
from tk_core.math import ceil_div
from tk_quant.cast.config import CastInput, TileConfig
from tk_quant.cast.scales import load_sf, sf_bytes, sf_type

# An e2m1 magnitude, shifted to the low exponent bits and top mantissa bit of a float32, is 2**-126 times its value.
_E2M1_SCALE = 2.0**126


def _thread_and_register(config: TileConfig, channels: int, block: Any, token: Any, index: Any) -> tuple[Any, Any]:
    """(thread, register) of element `index` of a token's row, which has an element for every `channels` channels."""
    down, _, across, size = config.tile
    width, vec, rows = across * size // channels, config.vec // channels, config.thread_rows
    vectors_per_thread = down * rows * width // vec // config.threads
    vector = ((block * rows + token % rows) * width + index) // vec
    of_thread = token // rows * vectors_per_thread + vector // config.threads
    return vector % config.threads, of_thread * vec + index % vec


def layout_of_tile(config: TileConfig, channels: int = 1) -> T.Fragment:
    """Layout of a tile, or of a fragment like it with one element (such as an sf) for every `channels` channels."""
    down, tokens, across, size = config.tile
    size //= channels
    return T.Fragment(
        (down, tokens, across, size),
        forward_fn=lambda i, t, g, j: _thread_and_register(config, channels, i, t, g * size + j),
    )


def layout_of_rows(config: TileConfig, channels: int) -> T.Fragment:
    """Layout of a fragment (blocks down, tokens of a block, words of a row), one word for every `channels` channels."""
    shape = (config.blocks_down, config.block_tokens, config.channels // channels)
    return T.Fragment(shape, forward_fn=lambda i, t, w: _thread_and_register(config, channels, i, t, w))


def input_type(x: CastInput, num_tokens: Any, hidden: int) -> Any:
    """TileLang type of the argument x: a plain tensor, or the data of a pair."""
    width = hidden * x.bits // (8 * x.dtype.itemsize)
    return T.StridedTensor((num_tokens, width), (T.dynamic("x_stride", "int64"), 1), T.dtype(x.dtype))


def input_sf_type(x: CastInput, hidden: int) -> Any:
    """TileLang type of the argument x_sf, the scale factors of a pair; a plain x comes with None."""
    if not x.is_pair:
        return T.Tensor((T.dynamic("x_sf_rows"),), "float32")
    byte_dtype = "float8_e4m3fn" if x.has_e4m3_sf else "float8_e8m0fnu"
    return sf_type(T.dynamic("x_sf_rows"), ceil_div(hidden, x.block_size[1]), x.layout, byte_dtype, "x_")


def values_dtype(x: CastInput) -> str:
    """Dtype of a tile's values: that of a plain x, float32 for a pair."""
    return "float32" if x.is_pair else T.dtype(x.dtype)


def _channels_of_sf(x: CastInput, hidden: int, vec: int) -> int:
    """How many neighbouring channels of a thread share one scale factor of the pair x."""
    _, block_channels = x.block_size
    return vec if block_channels >= hidden else gcd(block_channels, vec)


@T.macro
def _load(x: T.Buffer, tile: T.Buffer, row: T.int32, col: T.int32, config: TileConfig) -> None:
    """Load the tile at (row, col) by elements of x, each of which may hold two channels; zeros past the end."""
    _, tokens, _, size = tile.shape
    per_element = config.block_channels // size
    for i, t, g, j in T.Parallel(*tile.shape):
        token, column = row + i * tokens + t, col // per_element + g * size + j
        is_inside = token < x.shape[0] and column < x.shape[1]
        tile[i, t, g, j] = T.if_then_else(is_inside, x[token, column], T.cast(0, tile.dtype))


@T.macro
def load_values(
    x: T.Buffer, x_sf: T.Buffer, values: T.Buffer, row: T.int32, col: T.int32, of: CastInput, config: TileConfig
) -> None:
    """Load the tile at (row, col): a plain x in its own dtype, a pair dequantized to float32; zeros past the end."""
    num_tokens, hidden = x.shape[0], x.shape[1] * 8 * of.dtype.itemsize // of.bits
    T.assume(x.strides[0] % (of.alignment // of.dtype.itemsize) == 0)
    down, tokens, across, size = config.tile
    if not of.is_pair:
        _load(x, values, row, col, config)
    else:
        per_byte = 8 // of.bits
        codes = T.alloc_fragment((down, tokens, across, size // per_byte), T.dtype(of.dtype))
        T.annotate_layout({codes: layout_of_tile(config, per_byte)})
        _load(x, codes, row, col, config)
        step = _channels_of_sf(of, hidden, config.vec)
        sf = T.alloc_fragment((down, tokens, across, size // step), "float32")
        T.annotate_layout({sf: layout_of_tile(config, step)})
        sf_codes = x_sf if of.has_e4m3_sf else sf_bytes(x_sf, of.layout)
        block_tokens, block_channels = of.block_size
        for i, t, g, k in T.Parallel(down, tokens, across, size // step):
            token, channel = row + i * tokens + t, col + g * size + k * step
            is_inside = token < num_tokens and channel < hidden
            # Clamped to a valid index, as TileLang may load before it tests the condition.
            sf_row, sf_col = T.min(token, num_tokens - 1) // block_tokens, T.min(channel, hidden - 1) // block_channels
            of_block = load_sf(sf_codes, sf_row, sf_col, of.layout)
            sf[i, t, g, k] = T.if_then_else(is_inside, of_block, T.float32(0))
        for i, t, g, j in T.Parallel(down, tokens, across, size):
            if per_byte == 1:
                value = T.cast(codes[i, t, g, j], "float32")
            else:
                nibble = T.cast(codes[i, t, g, j // 2], "uint32") >> T.cast(j % 2 * 4, "uint32")
                bits = (nibble & T.uint32(7)) << T.uint32(22) | (nibble & T.uint32(8)) << T.uint32(28)
                value = T.reinterpret(bits, "float32") * T.float32(_E2M1_SCALE)
            values[i, t, g, j] = value * sf[i, t, g, j // step]


@T.macro
def block_amax(values: T.Buffer, amax: T.Buffer, config: TileConfig) -> None:
    """amax[i, g], int32: the bits of max |values[i, :, g, :]| as a float32; NaN has bits above all others."""
    down, tokens, across, size = config.tile
    # A thread has several narrow blocks; their maxima are exchanged with other threads at once.
    batch = max(config.vec // size, 1)
    if values.dtype != "float32":
        of_tokens = T.alloc_fragment((down, tokens, across), values.dtype)
        largest = T.alloc_fragment((down, across), values.dtype)
        T.reduce_absmax(values, of_tokens, dim=3, nan_propagate=True)
        if tokens > 1:
            T.reduce_max(of_tokens, largest, dim=1, nan_propagate=True, batch=batch)
            for i, g in T.Parallel(down, across):
                amax[i, g] = T.reinterpret(T.cast(largest[i, g], "float32"), "int32")
        else:
            for i, g in T.Parallel(down, across):
                amax[i, g] = T.reinterpret(T.cast(of_tokens[i, 0, g], "float32"), "int32")
    else:
        magnitudes = T.alloc_fragment(values.shape, "int32")
        of_tokens = T.alloc_fragment((down, tokens, across), "int32")
        for i, t, g, j in T.Parallel(down, tokens, across, size):
            magnitudes[i, t, g, j] = T.reinterpret(values[i, t, g, j], "int32") & MAGNITUDE_BITS
        T.reduce_max(magnitudes, of_tokens, dim=3)
        if tokens > 1:
            T.reduce_max(of_tokens, amax, dim=1, batch=batch)
        else:
            for i, g in T.Parallel(down, across):
                amax[i, g] = of_tokens[i, 0, g]


@T.macro
def amax_of_parts(amax: T.Buffer, largest: T.Ref) -> None:
    """Raise `largest`, 0 before, to the largest element of amax: the amax of a block that is split in parts."""
    parts = T.alloc_shared(amax.shape, "int32")
    T.copy(amax, parts)
    for i in T.unroll(amax.shape[0]):
        for g in T.unroll(amax.shape[1]):
            largest = T.max(largest, parts[i, g])


@T.macro
def scale_values(values: T.Buffer, factors: T.Buffer, config: TileConfig) -> T.Buffer:
    """The values in float32, times the factors of their blocks."""
    scaled = T.alloc_fragment(config.tile, "float32")
    T.annotate_layout({scaled: layout_of_tile(config)})
    for i, t, g, j in T.Parallel(*config.tile):
        scaled[i, t, g, j] = T.cast(values[i, t, g, j], "float32") * factors[i, g]
    return scaled
