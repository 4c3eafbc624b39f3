"""Steps of the RMSNorm kernels on a tile of whole rows; tile.py says which thread holds what.

A tile is a fragment (rows, 1, blocks, channels of a block). `row_at(i)` gives the tile's i-th row as `(batch, row,
whether it is one)`, where `batch` is a tuple of indices if the tensor has other dimensions. Kernels import this module
in their builder, as it imports TileLang.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tilelang.language as T
import torch

from tk_core.macros import quantize
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.cast import e2m1, e4m3, scales
from tk_quant.cast.config import TileConfig
from tk_quant.cast.tile import block_amax, layout_of_tile
from tk_quant.norm.arguments import NormOptions, RowCast
from tk_quant.norm.tile import WARP, lanes_of

RowAt = Callable[[Any], tuple[Any, Any, Any]]
_VECTOR = 8
"""Channels that a row's number of channels is a multiple of, so that one test guards a vector of them."""


def rows_type(name: str, shape: tuple[Any, Any, int], dtype: torch.dtype) -> Any:
    """TileLang type of an argument (batches, rows, hidden) whose strides are run-time arguments of their own."""
    strides = (T.dynamic(f"{name}_batch_stride", "int64"), T.dynamic(f"{name}_row_stride", "int64"), 1)
    return T.StridedTensor(shape, strides, T.dtype(dtype))


def weight_type(hidden: int, options: NormOptions, name: str = "num_weights") -> Any:
    """TileLang type of the argument weight, (G, hidden); the name is that of G."""
    return T.Tensor((T.dynamic(name), hidden), T.dtype(options.loaded_weight))


def rows_from(first: Any, num_batches: Any, num_rows: Any) -> RowAt:
    """The rows of all batches, one after the other, from the row `first` on."""
    total = num_batches * num_rows
    return lambda i: (T.truncdiv(first + i, num_rows), T.truncmod(first + i, num_rows), first + i < total)


def rows_of_batch(batch: Any, first: Any, num_rows: Any) -> RowAt:
    """The rows of one batch from the row `first` on."""
    return lambda i: (batch, first + i, first + i < num_rows)


def rows_up_to_last(first: Any, num_rows: Any) -> RowAt:
    """The rows from `first` on, and past the last one that again: for loads without a test of the row."""
    return lambda i: (0, T.min(first + i, num_rows - 1), True)


def index_of(batch: Any, row: Any, channel: Any) -> tuple[Any, ...]:
    """Index of a channel of a row."""
    return (*batch, row, channel) if isinstance(batch, tuple) else (batch, row, channel)


@T.macro
def _assume_alignment(x: T.Buffer, options: NormOptions) -> None:
    elements = options.alignment // (4 if x.dtype == "float32" else 2)
    for dim in tuple(range(len(x.strides) - 1)):
        T.assume(x.strides[dim] % elements == 0)


@T.macro
def load_rows(x: T.Buffer, tile: T.Buffer, row_at: RowAt, options: NormOptions, first: Any = 0) -> None:
    """Load the channels of a tile's rows from `first` on, in their own dtype; zeros past the last row and channel."""
    _assume_alignment(x, options)
    size = tile.shape[3]
    for i, t, g, j in T.Parallel(*tile.shape):
        batch, row, is_row = row_at(i)
        channel = first + g * size + j
        is_inside = is_row and channel // _VECTOR < x.shape[-1] // _VECTOR
        tile[i, t, g, j] = T.if_then_else(is_inside, x[index_of(batch, row, channel)], T.cast(0, tile.dtype))


@T.macro
def store_rows(tile: T.Buffer, x: T.Buffer, row_at: RowAt, options: NormOptions, first: Any = 0) -> None:
    """Store the rows of a tile, channels from `first` on, rounded to the dtype of x."""
    _assume_alignment(x, options)
    size = tile.shape[3]
    for i, t, g, j in T.Parallel(*tile.shape):
        batch, row, is_row = row_at(i)
        channel = first + g * size + j
        if is_row and channel // _VECTOR < x.shape[-1] // _VECTOR:
            x[index_of(batch, row, channel)] = T.cast(tile[i, t, g, j], x.dtype)


@T.macro
def load_weights(weight: T.Buffer, tile: T.Buffer, row_at: RowAt, options: NormOptions, first: Any = 0) -> None:
    """Load the weights of a tile's rows, channels from `first` on, in their own dtype; zeros past the last channel.

    Rows are not tested: with rows of weights, each that `row_at` gives must be one.
    """
    size, zero = tile.shape[3], T.cast(0, tile.dtype)
    for i, t, g, j in T.Parallel(*tile.shape):
        channel = first + g * size + j
        is_inside = channel // _VECTOR < weight.shape[1] // _VECTOR
        if options.has_rows_of_weight:
            tile[i, t, g, j] = T.if_then_else(is_inside, weight[row_at(i)[1], channel], zero)
        else:
            tile[i, t, g, j] = T.if_then_else(is_inside, weight[0, channel], zero)


@T.macro
def sums_of_rows(partials: T.Buffer, sums: T.Buffer, lanes: int) -> None:
    """sums[i] = the sum of row i's lanes in `partials`, one a thread: by shuffles in warps, then warp by warp."""
    num_rows, width = sums.shape[0], min(lanes, WARP)
    of_warps = T.alloc_fragment((num_rows, lanes // width), "float32")
    T.reduce_sum(T.reshape(partials, (num_rows, lanes // width, width)), of_warps, dim=2)
    if lanes == width:
        for i in T.Parallel(num_rows):
            sums[i] = of_warps[i, 0]
    else:
        shared = T.alloc_shared(of_warps.shape, "float32")
        T.copy(of_warps, shared)
        for i in T.Parallel(num_rows):
            total = T.alloc_var("float32", init=T.float32(0))
            for warp in T.unroll(of_warps.shape[1]):
                total = total + shared[i, warp]
            sums[i] = total


@T.macro
def rstd_of_rows(tile: T.Buffer, rstd: T.Buffer, eps: T.float32, hidden: int, config: TileConfig) -> None:
    """rstd[i] = 1 / sqrt(Σ h² / hidden + eps) of a tile's rows, with IEEE root and divisions."""
    size, vec = tile.shape[3], config.vec
    _, lanes, pieces = lanes_of(hidden, torch.float32 if tile.dtype == "float32" else torch.bfloat16)
    partials = T.alloc_fragment((config.threads,), "float32")
    sums = T.alloc_fragment((config.blocks_down,), "float32")
    T.clear(partials)
    for thread in T.Parallel(config.threads):
        for piece in T.unroll(pieces):
            for j in T.unroll(vec):
                channel = (piece * lanes + thread % lanes) * vec + j
                value = T.cast(tile[thread // lanes, 0, channel // size, channel % size], "float32")
                partials[thread] = T.fma(value, value, partials[thread])
    sums_of_rows(partials, sums, lanes)
    rstd_of_sums(sums, rstd, eps, hidden)


@T.macro
def rstd_of_sums(sums: T.Buffer, rstd: T.Buffer, eps: T.float32, hidden: int) -> None:
    """rstd[i] = 1 / sqrt(sums[i] / hidden + eps)."""
    for i in T.Parallel(*sums.shape):
        rstd[i] = T.float32(1) / T.sqrt(sums[i] / T.float32(hidden) + eps)


@T.macro
def add_residual(tile: T.Buffer, residual: T.Buffer, row_at: RowAt, options: NormOptions, config: TileConfig) -> None:
    """Add the residual's rows to those of a tile, rounded to its dtype."""
    others = T.alloc_fragment(config.tile, tile.dtype)
    T.annotate_layout({others: layout_of_tile(config)})
    load_rows(residual, others, row_at, options)
    for i, t, g, j in T.Parallel(*config.tile):
        total = T.cast(tile[i, t, g, j], "float32") + T.cast(others[i, t, g, j], "float32")
        tile[i, t, g, j] = T.cast(total, tile.dtype)


@T.macro
def normalize(
    tile: T.Buffer,
    weights: T.Buffer,
    rstd: T.Buffer,
    out: T.Buffer,
    out_scale: T.float32,
    weight_offset: T.float32,
    options: NormOptions,
) -> None:
    """out = (tile · rstd) · ((weight + weight_offset) · out_scale), each rounded, the last to the rows' dtype."""
    dtype = T.dtype(options.dtype)
    for i, t, g, j in T.Parallel(*tile.shape):
        value = T.cast(tile[i, t, g, j], "float32") * rstd[i]
        if options.round_before_weight:
            value = T.cast(T.cast(value, dtype), "float32")
        weight = T.cast(weights[i, t, g, j], "float32") if options.has_weight else T.float32(1)
        # A sum with 0 would turn a weight of -0 into 0.
        weight = T.if_then_else(weight_offset != T.float32(0), weight + weight_offset, weight)
        out[i, t, g, j] = T.cast(T.cast(value * (weight * out_scale), dtype), out.dtype)


class CastOutput(NamedTuple):
    """Where the codes and scale factors of a tile's rows go, the tile's first row being the batch's row `first`."""

    data: Any
    """(rows of all batches, bytes of a row)."""
    sf: Any
    """As for one matrix whose batches are `pitch` rows apart."""
    batch: Any
    first: Any
    num_rows: Any
    """Rows of a batch."""
    pitch: Any


@T.macro
def cast_rows(
    tile: T.Buffer,
    to: CastOutput,
    tensor_sf: T.Buffer,
    least_amax: T.float32,
    hidden: int,
    cast: RowCast,
    config: TileConfig,
    by_power: bool,
) -> T.Buffer:
    """Cast the rows of a tile by groups of channels, and store codes and scale factors; returns the latter."""
    rows, across = config.parts
    size, num_cols, of_sf = config.block_channels, ceil_div(hidden, cast.num_per_channels), cast.sf
    splits = cast.num_per_channels > size and num_cols == 1 and across > 1
    # One factor a group; of a group that is split in parts the same for each part.
    num_groups = 1 if splits else across
    amax = T.alloc_fragment((rows, across), "int32")
    largest = T.alloc_fragment((rows, num_groups), "int32")
    block_sf = T.alloc_fragment((rows, num_groups), "float32")
    factors = T.alloc_fragment((rows, across), "float32")
    block_amax(tile, amax, config)
    if splits:
        parts = T.alloc_shared((rows, across), "int32")
        T.copy(amax, parts)
        for i, g in T.Parallel(rows, 1):
            whole = T.alloc_var("int32", init=0)
            for k in T.unroll(across):
                whole = T.max(whole, parts[i, k])
            largest[i, g] = whole
    else:
        T.copy(amax, largest)
    if not of_sf.is_nvfp4:
        for i, g in T.Parallel(rows, num_groups):
            largest[i, g] = quantize.raised(largest[i, g], least_amax)
    for i, g in T.Parallel(rows, num_groups):
        block_sf[i, g] = scales.sf_of_group(largest[i, g], tensor_sf, cast.fmt, of_sf)[0]
    for i, g in T.Parallel(rows, across):
        factors[i, g] = scales.sf_of_group(largest[i, 0 if splits else g], tensor_sf, cast.fmt, of_sf)[1]
    sf_row, row = to.batch * to.pitch + to.first, to.batch * to.num_rows + to.first
    scales.store_sf(to.sf, block_sf, sf_row, 0, to.batch * to.pitch + to.num_rows, num_cols, of_sf.layout)
    end = (to.batch + 1) * to.num_rows
    if cast.fmt == "e4m3":
        e4m3.store_e4m3(tile, factors, to.data, row, 0, end, config)
    elif by_power:
        e2m1.store_e2m1_by_power(tile, factors, to.data, row, 0, end, config)
    else:
        # Factors that are made from the values' amax let no finite value saturate, unless sf is rounded to e4m3.
        are_bounded = not of_sf.is_nvfp4 and not of_sf.is_e4m3
        e2m1.store_e2m1(tile, factors, to.data, row, 0, end, are_bounded, config)
    return block_sf


@T.macro
def store_mega_moe_sf(
    sf: T.Buffer, block_sf: T.Buffer, first: T.int32, num_rows: T.int32, block: T.int32, hidden: int
) -> None:
    """Store the exponents of groups of 32 in the order in which DeepGEMM's fused MoE reads them.

    Its rows are padded from blocks of `block` to multiples of 128, in which each run of 32 rows is spread over four.
    """
    codes, num_cols = scales.sf_bytes(sf, ScaleLayout.PACKED_UE8M0), hidden // 32
    for i, g in T.Parallel(*block_sf.shape):
        if first + i < num_rows and g < num_cols:
            within = T.truncmod(first + i, block)
            begin = T.truncdiv(first + i, block) * T.ceildiv(block, 128) * 128
            row = begin + within // 128 * 128 + within % 32 * 4 + within % 128 // 32
            byte = T.cast(T.reinterpret(block_sf[i, g], "uint32") >> T.uint32(23), "uint8")
            codes[row, g // 4, g % 4] = byte


class RowRanges(NamedTuple):
    """Ranges of consecutive rows of equal length, the first ones longer by a row if the rows do not divide evenly."""

    first: Any
    """The range of a tile's first row; the next rows have the next ranges."""
    num_ranges: Any
    total: Any
    """Rows that have the same weight."""
    num_rows: Any
    """Rows of a batch."""


def rows_of_step(ranges: RowRanges, step: Any, group: Any, options: NormOptions) -> RowAt:
    """The row `step` of each range of a tile."""

    def row_at(i: Any) -> tuple[Any, Any, Any]:
        length, longer = T.truncdiv(ranges.total, ranges.num_ranges), T.truncmod(ranges.total, ranges.num_ranges)
        index = ranges.first + i
        is_row = step < length + T.if_then_else(index < longer, 1, 0)
        row = index * length + T.min(index, longer) + step
        if options.has_rows_of_weight:
            return row, group, is_row
        return T.truncdiv(row, ranges.num_rows), T.truncmod(row, ranges.num_rows), is_row

    return row_at


class Factors(NamedTuple):
    """What the backward multiplies rows by."""

    rstd: Any
    weights: Any
    out_scale: Any
    weight_offset: Any


@T.macro
def add_products(
    xs: T.Buffer, grads: T.Buffer, factors: Factors, partials: T.Buffer, options: NormOptions, config: TileConfig
) -> None:
    """Add x̂ · gw of a tile to each thread's partial sum."""
    lanes = config.blocks_across
    for thread in T.Parallel(config.threads):
        for j in T.unroll(config.vec):
            row, lane = thread // lanes, thread % lanes
            normed = T.cast(xs[row, 0, lane, j], "float32") * factors.rstd[row]
            grad = T.cast(grads[row, 0, lane, j], "float32") * factors.out_scale
            product = grad * _weight_of(factors, options, row, 0, lane, j)
            partials[thread] = T.fma(normed, product, partials[thread])


def _weight_of(factors: Factors, options: NormOptions, i: Any, t: Any, g: Any, j: Any) -> Any:
    weight = T.cast(factors.weights[i, t, g, j], "float32") if options.has_weight else T.float32(1)
    return T.if_then_else(factors.weight_offset != T.float32(0), weight + factors.weight_offset, weight)


@T.macro
def gradients(
    xs: T.Buffer,
    grads: T.Buffer,
    others: T.Buffer,
    factors: Factors,
    means: T.Buffer,
    weight_sums: T.Buffer,
    piece: Any,
    options: NormOptions,
    config: TileConfig,
) -> None:
    """Add x̂ · g to weight_sums[piece], and replace xs by x_grad; `others` is residual_out_grad."""
    for i, t, g, j in T.Parallel(*config.tile):
        normed = T.cast(xs[i, t, g, j], "float32") * factors.rstd[i]
        grad = T.cast(grads[i, t, g, j], "float32") * factors.out_scale
        if options.has_weight:
            weight_sums[piece, i, g, j] = T.fma(normed, grad, weight_sums[piece, i, g, j])
        x_grad = (grad * _weight_of(factors, options, i, t, g, j) - normed * means[i]) * factors.rstd[i]
        if options.has_residual:
            x_grad = x_grad + T.cast(others[i, t, g, j], "float32")
        xs[i, t, g, j] = T.cast(x_grad, xs.dtype)


def layout_of_sums(config: TileConfig, pieces: int) -> T.Fragment:
    """Layout of a fragment (pieces, rows, vectors, channels of a vector) whose pieces are like a tile of vectors."""
    shape, vec = (pieces, config.blocks_down, config.blocks_across, config.vec), config.vec
    return T.Fragment(shape, forward_fn=lambda p, i, g, j: (i * config.blocks_across + g, p * vec + j))


@T.macro
def store_parts(sums: T.Buffer, parts: T.Buffer, group: T.int32, part: T.int32) -> None:
    """Store the sums of a tile's rows, added ascending, as one of the parts (groups, parts, hidden)."""
    pieces, rows, across, size = sums.shape
    for piece in T.unroll(pieces):
        first = piece * across * size
        if rows == 1:
            for g, j in T.Parallel(across, size):
                if (first + g * size + j) // _VECTOR < parts.shape[2] // _VECTOR:
                    parts[group, part, first + g * size + j] = sums[piece, 0, g, j]
        else:
            shared = T.alloc_shared((rows, across * size), "float32")
            for i, g, j in T.Parallel(rows, across, size):
                shared[i, g * size + j] = sums[piece, i, g, j]
            for c in T.Parallel(across * size):
                total = T.alloc_var("float32", init=T.float32(0))
                for i in T.unroll(rows):
                    total = total + shared[i, c]
                if c < parts.shape[2]:
                    parts[group, part, c] = total
