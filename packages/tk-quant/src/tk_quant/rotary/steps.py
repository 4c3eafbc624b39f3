"""Steps of the RoPE kernels on a tile of rows, each of them a head of a token; apply_rotary.py has a picture.

`row_at(i)` gives the tile's i-th row as in norm/steps.py, `(index of its token, head, whether it is one)`. Kernels
import this module in their builder, as it imports TileLang.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch

from tk_core.math import align, ceil_div
from tk_quant.norm.steps import RowAt, index_of
from tk_quant.rotary.arguments import RotarySource


class Pairs(NamedTuple):
    """A tile of the pairs of channels of rows, in the order of memory: (rows, 2, lanes, vec) channels, interleaved ones
    (rows, lanes, vec, 2). A thread has the `vec` pairs of a lane, or of several."""

    rows: int
    lanes: int
    """Those behind half // vec have no pairs."""
    vec: int
    half: int
    """Pairs of a row."""
    threads: int
    row_threads: int
    """Threads that share a row, each `row_threads`-th lane."""
    is_interleaved: bool

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of a fragment of channels; one of pairs has (rows, lanes, vec)."""
        return (self.rows, *self.in_memory(self.lanes, self.vec, 2))

    def in_memory(self, lane: Any, pair: Any, side: Any) -> tuple[Any, Any, Any]:
        """Index of one of the two channels of a pair, behind its row's."""
        return (lane, pair, side) if self.is_interleaved else (side, lane, pair)

    def channel(self, i: Any, j: Any, k: Any) -> tuple[Any, Any]:
        """Of the element [:, i, j, k] of a tile: its lane, and its channel."""
        lane, pair, side = (i, j, k) if self.is_interleaved else (j, k, i)
        pair = lane * self.vec + pair
        return lane, 2 * pair + side if self.is_interleaved else side * self.half + pair

    def layout(self, shape: tuple[int, ...]) -> T.Fragment:
        """Layout of a tile, or of a fragment (rows, lanes) or (rows, lanes, vec)."""
        lane_dim = 2 if len(shape) == 4 and not self.is_interleaved else 1

        def place(row: Any, *index: Any) -> tuple[Any, Any]:
            lane = index[lane_dim - 1]
            thread = row * self.row_threads + lane % self.row_threads
            register = thread // self.threads * (self.lanes // self.row_threads) + lane // self.row_threads
            for dim in range(1, len(shape)):
                if dim != lane_dim:
                    register = register * shape[dim] + index[dim - 1]
            return thread % self.threads, register

        return T.Fragment(shape, place)

    def shape_of_rest(self, rest: int) -> tuple[int, int]:
        """(rows, channels) of a tile of the channels that do not turn, as many for each thread."""
        return self.rows, align(rest, 8 * self.row_threads)


def pairs_of(rot: int, of: RotarySource, threads: int, rows: int = 0, channels: int = 0) -> Pairs:
    """Pairs with 16 bytes of each half of a row, or of interleaved pairs, in a lane, or with so many channels.

    By default a row has as many threads as lanes, and a thread two or four rows; else there are as many rows as that.
    """
    half, itemsize = rot // 2, of.dtype.itemsize
    channels = channels or (16 // itemsize if of.is_interleaved else min(16 // itemsize, half & -half))
    vec = channels // 2 if of.is_interleaved else channels
    lanes = ceil_div(half, vec)
    if rows:
        row_threads = threads // rows
        return Pairs(rows, align(lanes, row_threads), vec, half, threads, row_threads, of.is_interleaved)
    lanes = 1 << (lanes - 1).bit_length()
    rows = (4 if of.is_interleaved else 2) * threads // lanes
    return Pairs(rows, lanes, vec, half, threads, lanes, of.is_interleaved)


class Angles(NamedTuple):
    """Where a kernel finds a token's cos and sin."""

    cos_cache: Any
    sin_cache: Any
    positions: Any
    seqlen_offset: Any
    direction: Any
    """1, or -1 for the conjugate."""


def strided(name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """TileLang type of an argument whose strides but the last are run-time arguments of their own."""
    strides = (T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(len(shape) - 1))
    return T.StridedTensor(shape, (*strides, 1), T.dtype(dtype))


def shapes(rot: int, of: RotarySource) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run-time shapes: (batch, num_tokens) or (num_tokens,), and that of cos_sin_cache."""
    batch = (T.dynamic("batch"),) if of.is_batched else ()
    cache = (T.dynamic("cache_rows"), rot // 2 if of.has_sin_cache else rot)
    return (*batch, T.dynamic("num_tokens")), (*batch, *cache) if of.has_cache_of_sequences else cache


def num_tokens(tokens: tuple[Any, ...]) -> Any:
    """Tokens of a tensor (*tokens, heads, channels)."""
    return tokens[0] * tokens[1] if len(tokens) == 2 else tokens[0]


def rows_from(first: Any, num_heads: Any, tokens: tuple[Any, ...]) -> RowAt:
    """(token, head, whether it is one) of the rows from `first` on, tokens of all sequences one after the other."""
    total = num_tokens(tokens) * num_heads
    return lambda i: (T.truncdiv(first + i, num_heads), T.truncmod(first + i, num_heads), first + i < total)


class Places(NamedTuple):
    """Where a tile's rows are, in fragments (rows,), so that no division is made twice."""

    sequence: Any
    """None without a batch."""
    token: Any
    head: Any

    @staticmethod
    def of(rows: int, tokens: tuple[Any, ...]) -> "Places":
        """Allocate them."""
        sequence = T.alloc_fragment((rows,), "int32") if len(tokens) == 2 else None
        return Places(sequence, T.alloc_fragment((rows,), "int32"), T.alloc_fragment((rows,), "int32"))

    def rows(self, token_at: RowAt) -> RowAt:
        """The rows of a tensor (*tokens, heads, channels) that `set_places` was given."""
        fragments = (self.token,) if self.sequence is None else (self.sequence, self.token)
        return lambda i: (tuple(each[i] for each in fragments), self.head[i], token_at(i)[2])


@T.macro
def set_places(places: Places, token_at: RowAt, tokens: tuple[Any, ...]) -> None:
    """Set the places of rows from token_at(i) = (token, head, whether it is one)."""
    for i in T.Parallel(*places.token.shape):
        at = token_at(i)
        if len(tokens) == 2:
            places.sequence[i] = T.truncdiv(at[0], tokens[1])
            places.token[i] = T.truncmod(at[0], tokens[1])
        else:
            places.token[i] = at[0]
        places.head[i] = at[1]


def rows_of_tile(token_at: RowAt | None = None) -> RowAt:
    """The rows of a tensor that is a tile itself, or those of them that token_at says are rows."""
    return lambda i: ((), i, T.bool(True) if token_at is None else token_at(i)[2])


@T.macro
def assume_alignment(strides: tuple[Any, ...], elements: int) -> None:
    """Let TileLang know that these strides are multiples of a number of elements."""
    for stride in strides:
        T.assume(stride % elements == 0)


@T.macro
def load_pairs(x: T.Buffer, tile: T.Buffer, row_at: RowAt, pairs: Pairs) -> None:
    """Load the channels of a tile that turn; rows past the last are left as they are."""
    for r, i, j, k in T.Parallel(*pairs.tile):
        at, (lane, channel) = row_at(r), pairs.channel(i, j, k)
        if at[2] and lane < pairs.half // pairs.vec:
            tile[r, i, j, k] = x[index_of(at[0], at[1], channel)]


@T.macro
def store_pairs(tile: T.Buffer, x: T.Buffer, row_at: RowAt, pairs: Pairs) -> None:
    """Store the channels of a tile that turn."""
    for r, i, j, k in T.Parallel(*pairs.tile):
        at, (lane, channel) = row_at(r), pairs.channel(i, j, k)
        if at[2] and lane < pairs.half // pairs.vec:
            x[index_of(at[0], at[1], channel)] = tile[r, i, j, k]


@T.macro
def copy_rest(x: T.Buffer, x_at: RowAt, out: T.Buffer, out_at: RowAt, first: int, rest: int, shape: Any) -> None:
    """Copy the `rest` channels from `first` on, which do not turn; shape: rows, and channels with those left out."""
    # A vector has 16 bytes at most, and where some are left out, channels are counted in eights.
    unit = 1 if shape[1] == rest else 8
    for r, c in T.Parallel(*shape):
        read, written = x_at(r), out_at(r)
        if read[2] and written[2] and c // unit < rest // unit:
            out[index_of(written[0], written[1], first + c)] = x[index_of(read[0], read[1], first + c)]


@T.macro
def load_positions(angles: Angles, position: T.Buffer, row_at: RowAt, of: RotarySource) -> None:
    """The positions of rows (*token, head), -1 outside of the cache."""
    for r, lane in T.Parallel(*position.shape):
        at = row_at(r)
        index = at[0][-1] if of.position_dtype is None else T.if_then_else(at[2], angles.positions[at[0]], -1)
        found = T.cast(index, "int64") + angles.seqlen_offset
        is_known = at[2] and found >= 0 and found < angles.cos_cache.shape[-2]
        position[r, lane] = T.if_then_else(is_known, T.cast(found, "int32"), -1)


@T.macro
def load_angles(
    angles: Angles, position: T.Buffer, cos: T.Buffer, sin: T.Buffer, row_at: RowAt, pairs: Pairs, of: RotarySource
) -> None:
    """cos and sin of the rows' positions, zeros where that is -1."""
    rows, lanes, vec, half = pairs[:4]
    sin_column = angles.cos_cache.shape[-1] - half
    for r, lane, k in T.Parallel(rows, lanes, vec):
        at = (*row_at(r)[0][: 1 if of.has_cache_of_sequences else 0], position[r, lane])
        cos[r, lane, k] = 0
        sin[r, lane, k] = 0
        if position[r, lane] >= 0 and lane < half // vec:
            cos[r, lane, k] = T.cast(angles.cos_cache[(*at, lane * vec + k)], "float32")
            sin[r, lane, k] = T.cast(angles.sin_cache[(*at, sin_column + lane * vec + k)], "float32")


@T.macro
def turn(
    tile: T.Buffer,
    turned: T.Buffer,
    position: T.Buffer,
    cos: T.Buffer,
    sin: T.Buffer,
    direction: T.float32,
    pairs: Pairs,
) -> None:
    """turned = the pairs of a tile turned, rounded to its dtype; zeros for rows without a position."""
    for r, lane, k in T.Parallel(pairs.rows, pairs.lanes, pairs.vec):
        pair, found = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        for side in T.unroll(2):
            value = T.cast(tile[(r, *pairs.in_memory(lane, k, side))], "float32")
            pair[side] = T.if_then_else(position[r, lane] >= 0, value, T.float32(0))
        found[0] = T.fma(pair[0], cos[r, lane, k], pair[1] * (sin[r, lane, k] * -direction))
        found[1] = T.fma(pair[0], sin[r, lane, k] * direction, pair[1] * cos[r, lane, k])
        for side in T.unroll(2):
            turned[(r, *pairs.in_memory(lane, k, side))] = T.cast(found[side], turned.dtype)
