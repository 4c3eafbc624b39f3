"""SwiGLU of sums of the gate and of up, and the cast of its results to e4m3: 128 columns of a row share a factor."""

from typing import NamedTuple

import tilelang.language as T
from tvm.tirx import Buffer

_LARGEST = 448.0
_LEAST_AMAX = 1e-4
_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


class Rows(NamedTuple):
    """The rows of a tile, or of a warpgroup's part of it."""

    first: T.PrimExpr  # the first one of them in all of the M rows
    m: T.PrimExpr
    is_row: T.Buffer  # int32 (rows) in registers: the others' results are 0, whatever their sums are


@T.macro
def find_weights(rows: Rows, pos: T.Buffer, weights: T.Buffer, weight: T.Buffer) -> None:
    """weight = that of each row; a row without one becomes padding in is_row."""
    for i in T.Parallel(*weight.shape):
        index = pos[T.min(rows.first + i, rows.m - 1)]
        weight[i] = 0
        if index >= 0 and index < weights.shape[0]:
            weight[i] = weights[index]
        else:
            rows.is_row[i] = 0


@T.macro
def activate(gate: T.Buffer, up: T.Buffer, weight: Buffer | None, clamp: T.PrimExpr | None) -> None:
    """gate = gate / (1 + exp(-gate)) * up * weight, from left to right; weight and clamp may be None."""
    if clamp is not None:
        for i, j in T.Parallel(*gate.shape):  # Comparisons, so that NaN stays.
            gate[i, j] = T.if_then_else(gate[i, j] > clamp, clamp, gate[i, j])
            up[i, j] = T.if_then_else(up[i, j] > clamp, clamp, T.if_then_else(up[i, j] < -clamp, -clamp, up[i, j]))
    for i, j in T.Parallel(*gate.shape):
        gate[i, j] = gate[i, j] / (T.float32(1) + T.exp(-gate[i, j])) * up[i, j]
    if weight is not None:
        for i, j in T.Parallel(*gate.shape):
            gate[i, j] = gate[i, j] * weight[i]


@T.macro
def find_amax(out: T.Buffer, spare: T.Buffer, amax: T.Buffer, clear: bool) -> None:
    """amax = the bits of the largest magnitude of each row, and of what was there unless `clear`."""
    # As integers, so that NaN is the largest.
    bits = T.view(spare, spare.shape, "int32")
    for i, j in T.Parallel(*out.shape):
        bits[i, j] = T.reinterpret(T.abs(out[i, j]), "int32")
    T.reduce_max(bits, amax, dim=1, clear=clear)


@T.macro
def quantize(rows: Rows, out: T.Buffer, spare: T.Buffer, sf: T.Buffer, block: T.PrimExpr) -> None:
    """out *= 448 / amax, for the cast to e4m3, and write each row's factor to sf[block]; both are 0 in padding."""
    amax = T.alloc_fragment(rows.is_row.shape, "int32")
    scale = T.alloc_fragment(rows.is_row.shape, "float32")
    find_amax(out, spare, amax, True)
    for i in T.Parallel(*scale.shape):
        largest = _magnitude(amax[i])
        scale[i] = T.float32(_LARGEST) / largest
        if rows.first + i < rows.m:
            sf[block, rows.first + i] = T.if_then_else(rows.is_row[i] != 0, largest / T.float32(_LARGEST), T.float32(0))
    for i, j in T.Parallel(*out.shape):
        out[i, j] = T.if_then_else(rows.is_row[i] != 0, out[i, j] * scale[i], T.float32(0))


@T.macro
def write_exponents(rows: Rows, amax: T.Buffer, scale: T.Buffer, sf: T.Buffer, block: T.PrimExpr) -> None:
    """Write each row's factor, the least power of two from amax / 448 on, to its byte of sf; scale = 1 / factor.

    sf is uint8 (words, 4 · M). The byte is 0 in padding. Without a finite amax it is 255, and scale the reciprocal of
    infinity or NaN.
    """
    for i in T.Parallel(*scale.shape):
        factor = T.reinterpret(_magnitude(amax[i]) / T.float32(_LARGEST), "int32")
        exponent = T.shift_right(T.min(factor, _INFINITY_BITS) + _MANTISSA_BITS, 23)
        is_finite = factor < _INFINITY_BITS
        scale[i] = T.float32(1) / T.reinterpret(T.if_then_else(is_finite, exponent << 23, factor), "float32")
        if rows.first + i < rows.m:
            byte = T.if_then_else(rows.is_row[i] != 0, exponent, 0)
            sf[T.truncdiv(block, 4), (rows.first + i) * 4 + T.truncmod(block, 4)] = T.cast(byte, "uint8")


@T.macro
def write_codes(rows: Rows, out: T.Buffer, scale: T.Buffer, data: T.Buffer, col: T.PrimExpr) -> None:
    """Write the e4m3 codes of out · scale to data (M, I), from column `col` on; 0 in padding."""
    # So that up to 32 codes are written at a time.
    T.assume(data.shape[1] % 128 == 0)
    T.assume(col % 32 == 0)
    for i, j in T.Parallel(*out.shape):
        if rows.first + i < rows.m:
            code = T.if_then_else(rows.is_row[i] != 0, out[i, j] * scale[i], T.float32(0))
            data[rows.first + i, col + j] = T.cast(code, data.dtype)


def _magnitude(bits: T.PrimExpr) -> T.PrimExpr:
    """A row's amax of its bits, at least the least one; NaN stays."""
    amax = T.reinterpret(bits, "float32")
    return T.if_then_else(amax < T.float32(_LEAST_AMAX), T.float32(_LEAST_AMAX), amax)
