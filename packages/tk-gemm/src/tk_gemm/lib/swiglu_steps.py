"""Steps of the SwiGLU product's epilogue. Only its kernel imports this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_steps import COL, ROW

_LARGEST = 448.0
_LEAST_AMAX = 1e-4


@T.macro
def find_weights(pos: Any, weights: Any, m: Any, num_weights: Any, place: Any, is_row: Any, weight: Any) -> None:
    """weight = that of each row; a row without one is padding."""
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
    """out = what e4m3 is to hold of it, and each row's factor to sf; zero in padding."""
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
