"""Steps on rows in registers: load, rotate, transform, cast to e4m3 or e2m1. Four lanes have a row.

A lane has of each 32 channels eight neighbours, one 16-byte load of bfloat16, so D / 4 in all:

    channels   0 … 7    8 … 15   16 … 23   24 … 31 │ 32 … 39  …      values[8 · v + j] is channel 32 · v + 8 · lane + j
    lane          0         1         2         3  │     0    …

The two channels of a rotated pair, and of a butterfly of stride 1, 2, 4, 32 or 64, are in one lane; those of the
strides 8 and 16 are in neighbours, which exchange values. A tile has one layout in a loop, which is why these steps are
written per lane. Each makes new values. A group, which has a factor, is the row for e4m3, and for e2m1 32 channels, of
which a lane has eight. Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_core.device.e2m1 import e2m1x8_by_power
from tk_core.macros.quantize import MAGNITUDE_BITS, encode_e2m1, encode_e4m3, raised, sf_of_amax
from tk_indexer.lib.rows import FP4_GROUP, ROPE_DIM, Transform

LANES = 4
"""Lanes that share a row."""
_VECTOR = 8


def _lane() -> T.PrimExpr:
    return T.get_thread_binding() % LANES


@T.macro
def _as_float32(x: T.Buffer) -> T.Buffer:
    """The same values as float32. Of bfloat16 a pair is two instructions, where casts take four."""
    values = T.alloc_local(x.shape, "float32")
    if x.dtype == "bfloat16":
        pairs = T.view(x, (x.shape[0] // 2,), "uint32")
        for i in T.unroll(x.shape[0] // 2):
            values[2 * i] = T.reinterpret(pairs[i] << T.uint32(16), "float32")
            values[2 * i + 1] = T.reinterpret(pairs[i] & T.uint32(0xFFFF0000), "float32")
    else:
        for i in T.unroll(x.shape[0]):
            values[i] = x[i]
    return values


@T.macro
def _rounded(values: T.Buffer) -> T.Buffer:
    """The values rounded to bfloat16, two at a time: one at a time is an instruction of an eighth of the rate."""
    rounded = T.alloc_local(values.shape, "bfloat16")
    for i in T.unroll(values.shape[0] // 2):
        for j in T.vectorized(2):
            rounded[2 * i + j] = T.cast(values[2 * i + j], "bfloat16")
    return _as_float32(rounded)


@T.macro
def load_row(x: T.Buffer, row: tuple[Any, ...], alignment: int) -> T.Buffer:
    """The lane's values of x[*row] as float32; rows lie on `alignment` bytes."""
    num_values, width = int(x.shape[-1]) // LANES, min(_VECTOR, 8 * alignment // T.dtype(x.dtype).bits)
    loaded = T.alloc_local((num_values,), x.dtype)
    first = _lane() * _VECTOR
    for v in T.unroll(num_values // _VECTOR):
        for part in T.unroll(_VECTOR // width):
            for j in T.vectorized(width):
                loaded[v * _VECTOR + part * width + j] = x[*row, v * LANES * _VECTOR + first + part * width + j]
    return _as_float32(loaded)


def _first_pair(v: Any, is_neox: bool) -> Any:
    """The first of the lane's pairs 4 v … 4 v + 3 among the 32: of its 8 channels, or of those of each 32."""
    return _lane() * _VECTOR + v * 4 if is_neox else v * 16 + _lane() * 4


@T.macro
def rotate(values: T.Buffer, table: T.Buffer, position: T.int64, rope_first: bool, is_neox: bool) -> T.Buffer:
    """The values with 64 channels rotated by the angles of a position, [cos | sin] in table[position]."""
    num_values, num_pairs = int(values.shape[0]), ROPE_DIM // 2
    rotated, turned = T.alloc_local((num_values,), "float32"), T.alloc_local((2 * _VECTOR,), "float32")
    loaded = T.alloc_local((2, _VECTOR), table.dtype)  # cosines, sines
    for half in T.unroll(2):
        for v in T.unroll(2):
            for j in T.vectorized(4):
                loaded[half, v * 4 + j] = table[position, half * num_pairs + _first_pair(v, is_neox) + j]
    base = 0 if rope_first else num_values - ROPE_DIM // LANES
    for p in T.unroll(_VECTOR):
        low = p if is_neox else 2 * p
        high = low + _VECTOR if is_neox else low + 1
        cos, sin = T.cast(loaded[0, p], "float32"), T.cast(loaded[1, p], "float32")
        turned[low] = values[base + low] * cos - values[base + high] * sin
        turned[high] = values[base + high] * cos + values[base + low] * sin
    turned = _rounded(turned)
    for i in T.unroll(num_values):
        if i >= base and i < base + 2 * _VECTOR:
            rotated[i] = turned[i - base]
        else:
            rotated[i] = values[i]
    return rotated


@T.macro
def _butterflies(values: T.Buffer, stride: int) -> T.Buffer:
    """Sums and differences of the values that are `stride` apart in the lane."""
    made = T.alloc_local(values.shape, "float32")
    for p in T.unroll(values.shape[0] // 2):
        low = p // stride * (2 * stride) + p % stride
        made[low] = values[low] + values[low + stride]
        made[low + stride] = values[low] - values[low + stride]
    return made


@T.macro
def _butterflies_of_lanes(values: T.Buffer, bit: int) -> T.Buffer:
    """Sums, in the lane without `bit`, and differences, in the other, of two lanes' values."""
    made, sign = T.alloc_local(values.shape, "float32"), T.alloc_var("float32")
    sign = T.if_then_else(_lane() & bit == 0, T.float32(1), T.float32(-1))
    for i in T.unroll(values.shape[0]):
        made[i] = T.ieee_fmaf(sign, values[i], T.shfl_xor(values[i], bit))  # Exact but for the sum's rounding.
    return made


@T.macro
def _scaled(values: T.Buffer, factor: float) -> T.Buffer:
    made = T.alloc_local(values.shape, "float32")
    for i in T.unroll(values.shape[0]):
        made[i] = values[i] * T.float32(factor)
    return made


def transform_by_hadamard(values: T.Buffer) -> T.Buffer:
    """The Hadamard transform in natural order, times D ** -0.5, rounded to bfloat16: strides 1, 2, 4, 8, …"""
    num_values = int(values.shape[0])
    for stride in (1, 2, 4):
        values = _butterflies(values, stride)
    for bit in (1, 2):
        values = _butterflies_of_lanes(values, bit)
    for stride in (8, 16):
        if stride < num_values:
            values = _butterflies(values, stride)
    return _rounded(_scaled(values, (LANES * num_values) ** -0.5))


def transformed_row(
    x: T.Buffer, row: tuple[Any, ...], table: T.Buffer, positions: T.Buffer, transform: Transform, alignment: int
) -> T.Buffer:
    """The lane's values of x[*row] after all steps of `transform`; positions[row[0]] is clamped into the table."""
    values = load_row(x, row, alignment)
    if transform.in_bf16 and x.dtype == "float32":
        values = _rounded(values)
    if transform.table_dtype is not None:
        last = T.cast(table.shape[0] - 1, "int64")
        position = T.alloc_var("int64", init=T.max(T.min(positions[row[0]], last), T.int64(0)))
        values = rotate(values, table, position, transform.rope_first, transform.is_neox)
    return transform_by_hadamard(values) if transform.hadamard else values


@T.macro
def factors_of_row(values: T.Buffer, fmt: str, round_sf: bool, least_amax: T.float32) -> T.Buffer:
    """[sf, factor] of each group of a row of which four lanes have the values, as `sf_of_amax`; float32 (groups, 2)."""
    num_groups = values.shape[0] * LANES // FP4_GROUP if fmt == "e2m1" else 1
    size = values.shape[0] // num_groups
    factors = T.alloc_local((num_groups, 2), "float32")
    amax = T.alloc_var("int32")
    for group in T.unroll(num_groups):
        amax = 0
        for i in T.unroll(size):
            amax = T.max(amax, T.reinterpret(values[group * size + i], "int32") & MAGNITUDE_BITS)
        for step in T.unroll(2):
            amax = T.max(amax, T.shfl_xor(amax, 1 << step))
        amax = raised(amax, least_amax)
        factors[group, 0], factors[group, 1] = sf_of_amax(amax, fmt, round_sf)
    return factors


@T.macro
def sf_word(factors: T.Buffer, fmt: str) -> T.PrimExpr:
    """A row's four bytes of sf, uint32: a float32, or UE8M0 of each group, then zeros."""
    word = T.alloc_var("uint32", init=T.reinterpret(factors[0, 0], "uint32"))
    if fmt == "e2m1":
        word = 0
        for group in T.unroll(factors.shape[0]):
            word = word | (T.reinterpret(factors[group, 0], "uint32") >> T.uint32(23) << T.uint32(8 * group))
    return word


@T.macro
def store_codes(
    values: T.Buffer, factors: T.Buffer, fmt: str, in_pairs: bool, out: T.Buffer, row: tuple[Any, ...], first: Any
) -> None:
    """Store the codes of values times their groups' factors to out[*row, first:], whose elements are bytes.

    `in_pairs`: to e2m1 two at a time, for values that bfloat16 has: a third fewer instructions.
    """
    scaled, pairs = T.alloc_local((_VECTOR,), "float32"), T.alloc_local((_VECTOR,), "bfloat16")
    words, power = T.alloc_local((1 if fmt == "e2m1" else 2,), "uint32"), T.alloc_var("uint32")
    num_vectors = values.shape[0] // _VECTOR
    for v in T.unroll(num_vectors):
        factor = factors[v * factors.shape[0] // num_vectors, 1]
        for j in T.unroll(_VECTOR):
            scaled[j] = values[v * _VECTOR + j] * factor
        if in_pairs:
            for i in T.unroll(_VECTOR // 2):
                for j in T.vectorized(2):
                    pairs[2 * i + j] = T.cast(values[v * _VECTOR + 2 * i + j], "bfloat16")
            power = T.reinterpret(factor, "uint32")
            x = T.view(pairs, (_VECTOR // 2,), "uint32")
            words[0] = e2m1x8_by_power((x[0], x[1], x[2], x[3]), power | (power >> T.uint32(16)))
        elif fmt == "e2m1":
            encode_e2m1(scaled, words, True)
        else:
            encode_e4m3(scaled, words)
        if fmt == "e2m1":
            T.stg32(out[*row, first + (v * LANES + _lane()) * (_VECTOR // 2)], words[0])
        else:
            T.stg64(out[*row, first + (v * LANES + _lane()) * _VECTOR], words[0:2])
