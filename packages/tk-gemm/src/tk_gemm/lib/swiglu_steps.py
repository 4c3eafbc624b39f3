"""Steps of the SwiGLU product's epilogue. Only its kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_steps import COL, ROW

_LARGEST = 448.0
_LEAST_AMAX = 1e-4
_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


@T.macro
def find_weights(pos: Any, weights: Any, m: Any, num_weights: Any, place: Any, is_row: Any, weight: Any) -> None:
    """weight = that of each row; a row without one becomes padding in is_row."""
    for i in T.Parallel(*weight.shape):
        index = pos[T.min(place[ROW] + i, m - 1)]
        weight[i] = 0
        if index >= 0 and index < num_weights:
            weight[i] = weights[index]
        else:
            is_row[i] = 0


@T.macro
def activate(gate: Any, up: Any, weight: Any, clamp: Any) -> None:
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
def quantize(out: Any, spare: Any, is_row: Any, amax: Any, scale: Any, sf: Any, m: Any, place: Any) -> None:
    """out *= 448 / amax, for the cast to e4m3, and write each row's factor to sf; both are 0 in padding."""
    # As integers, so that NaN is the largest.
    bits = T.view(spare, spare.shape, "int32")
    for i, j in T.Parallel(*out.shape):
        bits[i, j] = T.reinterpret(T.abs(out[i, j]), "int32")
    T.reduce_max(bits, amax, dim=1)
    for i in T.Parallel(*scale.shape):
        largest = T.reinterpret(amax[i], "float32")
        largest = T.if_then_else(largest < T.float32(_LEAST_AMAX), T.float32(_LEAST_AMAX), largest)
        scale[i] = T.float32(_LARGEST) / largest
        if place[ROW] + i < m:
            sf[place[COL] // 128, place[ROW] + i] = T.if_then_else(
                is_row[i] != 0, largest / T.float32(_LARGEST), T.float32(0)
            )
    for i, j in T.Parallel(*out.shape):
        out[i, j] = T.if_then_else(is_row[i] != 0, out[i, j] * scale[i], T.float32(0))


@T.macro
def raise_amax(out: Any, spare: Any, amax: Any) -> None:
    """amax = the bits of the largest magnitude of each row, of these and earlier columns; NaN is the largest."""
    bits = T.view(spare, spare.shape, "int32")
    for i, j in T.Parallel(*out.shape):
        bits[i, j] = T.reinterpret(T.abs(out[i, j]), "int32")
    T.reduce_max(bits, amax, dim=1, clear=False)


@T.macro
def write_exponents(amax: Any, is_row: Any, scale: Any, sf: Any, m: Any, place: Any) -> None:
    """Write each row's factor, the least power of two from amax / 448 on, to its byte of sf; scale = 1 / factor.

    The byte is 0 in padding. Without a finite amax it is 255, and scale the reciprocal of infinity or NaN.
    """
    block = T.truncdiv(place[COL], 256)
    for i in T.Parallel(*scale.shape):
        largest = T.reinterpret(amax[i], "float32")
        largest = T.if_then_else(largest < T.float32(_LEAST_AMAX), T.float32(_LEAST_AMAX), largest)
        factor = T.reinterpret(largest / T.float32(_LARGEST), "int32")
        exponent = T.shift_right(T.min(factor, _INFINITY_BITS) + _MANTISSA_BITS, 23)
        is_finite = factor < _INFINITY_BITS
        scale[i] = T.float32(1) / T.reinterpret(T.if_then_else(is_finite, exponent << 23, factor), "float32")
        if place[ROW] + i < m:
            byte = T.if_then_else(is_row[i] != 0, exponent, 0)
            sf[T.truncdiv(block, 4), (place[ROW] + i) * 4 + T.truncmod(block, 4)] = T.cast(byte, "uint8")


@T.macro
def write_codes(out: Any, is_row: Any, scale: Any, data: Any, m: Any, place: Any, first: Any) -> None:
    """Write the e4m3 codes of out · scale to data, from the tile's column `first` on; 0 in padding."""
    T.assume(data.shape[1] % 128 == 0)
    for i, j in T.Parallel(*out.shape):
        if place[ROW] + i < m:
            code = T.if_then_else(is_row[i] != 0, out[i, j] * scale[i], T.float32(0))
            data[place[ROW] + i, T.truncdiv(place[COL], 256) * 128 + first + j] = T.cast(code, data.dtype)
