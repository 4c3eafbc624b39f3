"""Tiles of 128 tokens in the kernels that cast by channel: from values in registers to scale factors and codes.

A thread holds `vec` channels of `rows` neighbouring tokens. The amax of a channel in a block of tokens, which many
threads share, is found in three steps:

    columns    [block of tokens, row lane, channel, row]    each thread reduces its own rows of a channel
    parts      [block of tokens, row lane, channel]         through shared memory to one thread for each channel, or to
                                                            two, lanes i and i + 16, each of which reduces half
    amax       [block of tokens, channel]                   makes sf and the factor, which goes to all row lanes

Kernels import this module in their builder, as it imports TileLang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tk_core.macros.quantize import MAGNITUDE_BITS, raised, sf_of_amax
from tk_quant.cast.config import TILE_ROWS


@dataclass(frozen=True)
class ChannelTile:
    """How a tile of 128 tokens by `channels` channels is distributed over threads."""

    channels: int
    rows: int
    """Neighbouring tokens of a thread: a divisor of num_per_tokens."""
    vec: int
    """Neighbouring channels of a thread."""
    num_per_tokens: int
    """Tokens of a block, which has a scale factor for each channel."""

    @property
    def blocks(self) -> int:
        """Blocks of tokens in the tile."""
        return TILE_ROWS // self.num_per_tokens

    @property
    def lanes(self) -> int:
        """Row lanes: threads that have the same channels of a block's tokens."""
        return self.num_per_tokens // self.rows

    @property
    def threads(self) -> int:
        """Threads of a tile."""
        return self.channels // self.vec * self.blocks * self.lanes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the values as they are loaded: (blocks, lanes, rows, channels)."""
        return (self.blocks, self.lanes, self.rows, self.channels)

    @property
    def shape_of_columns(self) -> tuple[int, int, int, int]:
        """Shape of the values with a thread's rows adjacent: (blocks, lanes, channels, rows)."""
        return (self.blocks, self.lanes, self.channels, self.rows)

    @property
    def halves(self) -> int:
        """Halves of a warp that reduce the parts of a channel: 2 if there are at least two threads for each factor."""
        return 2 if self.threads >= 2 * self.blocks * self.channels and self.lanes >= 2 else 1

    def token(self, block: Any, lane: Any, row: Any) -> Any:
        """Token of the tile at this block, row lane and row of a thread."""
        return (block * self.lanes + lane) * self.rows + row

    def indices(self, token: Any) -> tuple[Any, Any, Any]:
        """(block, row lane, row of the thread) of a token of the tile."""
        return token // self.num_per_tokens, token % self.num_per_tokens // self.rows, token % self.rows

    def of_value(self, block: Any, lane: Any, row: Any, channel: Any) -> tuple[Any, Any]:
        """(thread, register) of a value as it is loaded: a thread's rows one after the other."""
        thread, register = self.of_part(block, lane, channel)
        return thread, row * self.vec + register

    def of_column(self, block: Any, lane: Any, channel: Any, row: Any) -> tuple[Any, Any]:
        """(thread, register) of a value in `columns`: a thread's channels one after the other."""
        thread, register = self.of_part(block, lane, channel)
        return thread, register * self.rows + row

    def of_transposed(self, channel: Any, token: Any) -> tuple[Any, Any]:
        """(thread, register) of a value of a transposed tile (channels, tokens), ordered as in `columns`."""
        block, lane, row = self.indices(token)
        return self.of_column(block, lane, channel, row)

    def swizzled(self, channel: Any, token: Any) -> tuple[Any, Any]:
        """Position in shared memory of a code of a transposed tile.

        Eight lanes that write neighbouring vectors of channels, or that read one channel, have no bank conflicts.
        """
        return channel, (token // 16 ^ (channel // self.vec % 8)) * 16 + token % 16

    def of_part(self, block: Any, lane: Any, channel: Any) -> tuple[Any, Any]:
        """(thread, register) of a thread's amax of a channel, in `parts`."""
        return (block * self.lanes + lane) * (self.channels // self.vec) + channel // self.vec, channel % self.vec

    def of_gathered(self, block: Any, lane: Any, channel: Any) -> tuple[Any, Any]:
        """(thread, register) of parts after the exchange: all of a channel in one thread, or in lanes i and i + 16."""
        at_once, factor = self.threads // self.halves, block * self.channels + channel
        slot = factor % at_once
        thread = slot // 16 * 32 + lane % 2 * 16 + slot % 16 if self.halves == 2 else slot
        return thread, factor // at_once * (self.lanes // self.halves) + lane // self.halves


def fragment(shape: tuple[int, ...], dtype: Any, layout: Callable[..., tuple[Any, Any]]) -> T.Buffer:
    """A fragment whose elements lie in the (thread, register) that `layout` has for their indices."""
    buffer = T.alloc_fragment(shape, dtype)
    T.annotate_layout({buffer: T.Fragment(shape, forward_fn=layout)})
    return buffer


@T.macro
def load_values(x: T.Buffer, row: T.int32, channel: T.int32, tile: ChannelTile) -> T.Buffer:
    """Load the tile at (row, channel) of x (rows, channels); zeros past the last channel."""
    values = fragment(tile.shape, x.dtype, tile.of_value)
    for b, i, r, j in T.Parallel(*tile.shape):
        values[b, i, r, j] = x[row + tile.token(b, i, r), channel + j]
    return values


@T.macro
def find_tokens(pos_to_token: T.Buffer, row: T.int32, num_tokens: T.int32, tile: ChannelTile) -> T.Buffer:
    """Source row in x of each row of the tile, from `row` on: int32 (blocks, lanes, rows), negative for none."""
    tokens = T.alloc_fragment(tile.shape[:3], "int32")
    for b, i, r in T.Parallel(*tokens.shape):
        tokens[b, i, r] = -1
        if row + tile.token(b, i, r) < pos_to_token.shape[0]:
            token = pos_to_token[row + tile.token(b, i, r)]
            tokens[b, i, r] = T.if_then_else(token < num_tokens, token, -1)
    return tokens


@T.macro
def gather_values(x: T.Buffer, tokens: T.Buffer, channel: T.int32, tile: ChannelTile) -> T.Buffer:
    """Load a tile of the rows `tokens` of x, from `channel` on; zeros where a token is negative."""
    values = fragment(tile.shape, x.dtype, tile.of_value)
    for b, i, r, j in T.Parallel(*tile.shape):
        is_read = tokens[b, i, r] >= 0 and channel + j < x.shape[1]
        values[b, i, r, j] = T.if_then_else(is_read, x[tokens[b, i, r], channel + j], T.cast(0, x.dtype))
    return values


@T.macro
def columns_of(values: T.Buffer, tile: ChannelTile) -> T.Buffer:
    """The values with a thread's rows in adjacent registers, so that bfloat16 is reduced in pairs."""
    columns = fragment(tile.shape_of_columns, values.dtype, tile.of_column)
    for b, i, j, r in T.Parallel(*columns.shape):
        columns[b, i, j, r] = values[b, i, r, j]
    return columns


@T.macro
def amax_bits(values: T.Buffer, amax: T.Buffer, dim: int) -> None:
    """amax, int32: the bits of max |values| over a dimension as a float32; NaN has bits above all others."""
    if values.dtype == "bfloat16":
        largest = T.alloc_fragment(amax.shape, "bfloat16")
        T.reduce_absmax(values, largest, dim=dim, nan_propagate=True)
        for index in T.Parallel(*amax.shape):
            amax[*index] = T.reinterpret(T.cast(largest[*index], "float32"), "int32")
    else:
        magnitudes = T.alloc_fragment(values.shape, "int32")
        for index in T.Parallel(*values.shape):
            magnitudes[*index] = T.reinterpret(values[*index], "int32") & MAGNITUDE_BITS
        T.reduce_max(magnitudes, amax, dim=dim)


@T.macro
def factors_of_blocks(
    columns: T.Buffer,
    sf: T.Buffer,
    sf_row: T.int32,
    channel: T.int32,
    least_amax: T.float32,
    tile: ChannelTile,
    round_sf: bool,
    num_packed: Any = None,
) -> T.Buffer:
    """Store the sf of a tile's blocks in rows from `sf_row` on, and return the factors to multiply its values by.

    columns: the tile's values, bfloat16 or float32, from `channel` on. sf: float32 (blocks of all tokens, hidden); or
    with the number of these blocks, `num_packed`, int32 words of the exponents of four blocks, zero past the last one.
    Returns float32 (blocks, channels) in registers.
    """
    parts = fragment((tile.blocks, tile.lanes, tile.channels), "int32", tile.of_part)
    gathered = fragment(parts.shape, "int32", tile.of_gathered)
    amax_bits(columns, parts, 3)
    # Padded, so that the halves of a warp read from different banks.
    exchanged = T.alloc_shared((tile.blocks, tile.lanes, tile.channels + 16 * (tile.halves - 1)), "int32")
    T.copy(parts, exchanged[:, :, 0 : tile.channels])
    T.copy(exchanged[:, :, 0 : tile.channels], gathered)
    amax = T.alloc_fragment((tile.blocks, tile.channels), "int32")
    T.reduce_max(gathered, amax, dim=1)
    of_blocks = T.alloc_shared((tile.blocks, tile.channels), "float32")
    if num_packed is None:
        for b, j in T.Parallel(tile.blocks, tile.channels):
            sf[sf_row + b, channel + j], of_blocks[b, j] = sf_of_amax(raised(amax[b, j], least_amax), "e4m3", round_sf)
    else:
        exponents = T.view(sf, (*sf.shape, 4), "uint8")
        for b, j in T.Parallel(tile.blocks, tile.channels):
            of_block, of_blocks[b, j] = sf_of_amax(raised(amax[b, j], least_amax), "e4m3", round_sf)
            exponent = T.cast(T.reinterpret(of_block, "uint32") >> T.uint32(23), "uint8")
            exponents[(sf_row + b) // 4, channel + j, (sf_row + b) % 4] = exponent
        end = sf_row + tile.blocks
        if end == num_packed:
            for k, j in T.Parallel(3, tile.channels):
                if (end + k) // 4 < sf.shape[0]:
                    exponents[(end + k) // 4, channel + j, (end + k) % 4] = T.uint8(0)
    factors = T.alloc_fragment((tile.blocks, tile.channels), "float32")
    T.copy(of_blocks, factors)
    return factors


@T.macro
def store_codes(scaled: T.Buffer, out: T.Buffer, row: T.int32, channel: T.int32, tile: ChannelTile) -> None:
    """Cast float32 values, laid out by `of_value`, to e4m3, and store them in out from (row, channel) on."""
    codes = fragment(tile.shape, "float8_e4m3fn", tile.of_value)
    T.copy(scaled, codes)
    for b, i, r, j in T.Parallel(*tile.shape):
        out[row + tile.token(b, i, r), channel + j] = codes[b, i, r, j]


@T.macro
def store_by_channel(
    columns: T.Buffer,
    factors: T.Buffer,
    out: T.Buffer,
    row: T.int32,
    channel: T.int32,
    tile: ChannelTile,
    transpose: bool,
) -> None:
    """Store the e4m3 codes of values * factors (blocks, channels) in out, from (row, channel) on.

    out is (rows, channels); with `transpose` it is (channels, rows), and the codes go through shared memory.
    """
    if not transpose:
        scaled = fragment(tile.shape, "float32", tile.of_value)
        for b, i, r, j in T.Parallel(*tile.shape):
            scaled[b, i, r, j] = T.cast(columns[b, i, j, r], "float32") * factors[b, j]
        store_codes(scaled, out, row, channel, tile)
    else:
        by_channel = T.alloc_shared((tile.channels, TILE_ROWS), "float8_e4m3fn")
        turned = T.alloc_fragment(by_channel.shape, "float32")
        codes = T.alloc_fragment(by_channel.shape, "float8_e4m3fn")
        T.annotate_layout({by_channel: T.Layout(by_channel.shape, tile.swizzled)})
        T.annotate_layout({each: T.Fragment(each.shape, forward_fn=tile.of_transposed) for each in (turned, codes)})
        for j, t in T.Parallel(*by_channel.shape):
            b, i, r = tile.indices(t)
            turned[j, t] = T.cast(columns[b, i, j, r], "float32") * factors[b, j]
        T.copy(turned, codes)
        T.copy(codes, by_channel)
        T.copy(by_channel, out[channel : channel + tile.channels, row : row + TILE_ROWS])
