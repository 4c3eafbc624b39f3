"""Scale factors inside a kernel: computed from amax, loaded and stored in every layout of tk_core.scales.

Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.lib.quantize import INFINITY_BITS, LIMITS, float_bits

_NAN_BITS = 0x7FFFFFFF
_BYTES = (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)


def scales_type(
    num_rows: Any, num_cols: int, layout: ScaleLayout, byte_dtype: str = "float8_e8m0fnu", prefix: str = ""
) -> Any:
    """TileLang type of a kernel argument that holds the scale factors of (num_rows, num_cols) blocks.

    COL_MAJOR has run-time strides, so the same kernel serves row-major float32. `byte_dtype` is float8_e4m3fn for
    NVFP4, in ROW_MAJOR or SWIZZLED. `prefix` tells the dynamic symbols of several such arguments apart.
    """
    if layout is ScaleLayout.SWIZZLED:
        return T.Tensor((T.dynamic(prefix + "sf_row_tiles"), ceil_div(num_cols, 4), 32, 4, 4), byte_dtype)
    if layout is ScaleLayout.ROW_MAJOR:
        return T.Tensor((num_rows, num_cols), "float32" if byte_dtype == "float8_e8m0fnu" else byte_dtype)
    packed = layout is ScaleLayout.PACKED_UE8M0
    strides = tuple(T.dynamic(f"{prefix}sf_{dim}_stride", "int64") for dim in ("row", "col"))
    shape = (num_rows, ceil_div(num_cols, 4) if packed else num_cols)
    return T.StridedTensor(shape, strides, "int32" if packed else "float32")


def scale_rows(num_rows: Any, layout: ScaleLayout) -> Any:
    """Rows of sf that a kernel has to write: for swizzled sf whole tiles of 128 rows, zeros after the last block."""
    return T.ceildiv(num_rows, 128) * 128 if layout is ScaleLayout.SWIZZLED else num_rows


def raised(amax: Any, least_amax: Any) -> Any:
    """The larger of amax, int32 bits as in `scale_of_bounded_amax`, and the positive float32 least_amax, as bits."""
    return T.max(amax, T.reinterpret(least_amax, "int32"))


def scale_of_bounded_amax(amax: Any, fmt: str, round_sf: bool) -> tuple[Any, Any]:
    """`(sf, s)` of a block, float32 expressions: the scale factor, and the factor that x is multiplied by.

    amax is int32, the bits of max |x| as a float32, and at least 2**-126 times the largest value of fmt. Such bits
    compare in order, with NaN above infinity. An amax of infinity or NaN gives an sf of infinity or NaN.

    With round_sf no division is needed. Let amax = m * 2**e and the largest value of fmt = L * 2**k, with m and L in
    [1, 2). The quotient m / L rounds to more than 1 exactly if m > L, so sf is 2**(e - k), or twice that if m > L.
    """
    largest, _ = LIMITS[fmt]
    if not round_sf:
        value = T.reinterpret(amax, "float32")
        return value / T.float32(largest), T.float32(largest) / value
    exponent, mantissa = float_bits(largest) >> 23, float_bits(largest) & 0x007FFFFF
    rounded_up = (T.reinterpret(amax, "uint32") + T.uint32(0x007FFFFF - mantissa)) & T.uint32(INFINITY_BITS)
    power = rounded_up - T.uint32((exponent - 127) << 23)
    is_finite, is_infinite = amax < INFINITY_BITS, amax == INFINITY_BITS
    not_finite = T.if_then_else(is_infinite, T.uint32(INFINITY_BITS), T.uint32(_NAN_BITS))
    sf = T.if_then_else(is_finite, power, not_finite)
    # The exponent fields of 2**k and 2**-k sum up to 254. The reciprocal of infinity is 0, that of NaN is NaN.
    not_finite = T.if_then_else(is_infinite, T.uint32(0), T.uint32(_NAN_BITS))
    factor = T.if_then_else(is_finite, T.uint32(0x7F000000) - power, not_finite)
    return T.reinterpret(sf, "float32"), T.reinterpret(factor, "float32")


@T.macro
def nvfp4_scale_of_amax(amax: T.int32, tensor_sf: T.float32) -> tuple[T.float32, T.float32]:
    """`(sf, s)` of an NVFP4 group: sf, beside tensor_sf, is e4m3, at least 2**-9, and NaN if amax is not finite."""
    quotient, sf = T.alloc_var("float32"), T.alloc_local((1,), "float8_e4m3fn")
    quotient = T.reinterpret(amax, "float32") / T.float32(LIMITS["e2m1"][0]) / tensor_sf
    # Written so that NaN stays NaN.
    quotient = T.if_then_else(quotient < T.float32(2.0**-9), T.float32(2.0**-9), quotient)
    quotient = T.if_then_else(amax < INFINITY_BITS, quotient, T.reinterpret(T.uint32(_NAN_BITS), "float32"))
    sf[0] = T.cast(quotient, "float8_e4m3fn")
    scale = T.cast(sf[0], "float32")
    return scale, T.float32(1) / (scale * tensor_sf)


def float_of_ue8m0(exponent: Any) -> Any:
    """float32 expression of a UE8M0 scale factor, a biased exponent (uint8): 0 is 2**-127, 255 is NaN."""
    wide = T.cast(exponent, "uint32")
    bits = T.if_then_else(wide == 0, T.uint32(0x00400000), wide << T.uint32(23))
    return T.reinterpret(T.if_then_else(wide == 255, T.uint32(_NAN_BITS), bits), "float32")


def scale_bytes(sf: T.Buffer, layout: ScaleLayout) -> T.Buffer:
    """View sf as bytes: packed (rows, words, 4), swizzled (row tiles, column tiles, 32, 4, 4); float32 as it is."""
    if layout is ScaleLayout.PACKED_UE8M0:
        row_stride, col_stride = sf.strides
        return T.view(sf, (*sf.shape, 4), "uint8", strides=(4 * row_stride, 4 * col_stride, 1))
    if layout is ScaleLayout.SWIZZLED:
        return T.view(sf, sf.shape, "uint8")
    return sf


def scale_place(row: Any, col: Any, layout: ScaleLayout) -> tuple[Any, ...]:
    """Index in the result of `scale_bytes` of the scale factor of block (row, col)."""
    if layout is ScaleLayout.PACKED_UE8M0:
        return row, col // 4, col % 4
    if layout is ScaleLayout.SWIZZLED:
        return row // 128, col // 4, row % 32, row % 128 // 32, col % 4
    return row, col


def load_scale(sf: T.Buffer, row: Any, col: Any, layout: ScaleLayout) -> Any:
    """float32 expression of the scale factor of block (row, col); `sf` is the result of `scale_bytes`."""
    value = sf[scale_place(row, col, layout)]
    return float_of_ue8m0(value) if layout in _BYTES else value


@T.macro
def store_scales(
    sf: T.Buffer, values: T.Buffer, row: T.int32, col: T.int32, num_rows: T.int32, num_cols: int, layout: ScaleLayout
) -> None:
    """Store a fragment of float32 scale factors (rows, columns) of the blocks from (row, col) on.

    For an e8m0 sf the values are powers of two, infinity or NaN; for an e4m3 sf they are e4m3 values. Values outside
    the (num_rows, num_cols) blocks are skipped. One-byte layouts are padded with zeros: the bytes after the last column
    if the fragment has all columns or reaches that far; and the rows of a swizzled sf after the last block, up to
    `scale_rows`, if the fragment has them.
    """
    if layout not in _BYTES:
        for i, j in T.Parallel(values.shape[0], values.shape[1]):
            if row + i < num_rows and col + j < num_cols:
                sf[row + i, col + j] = T.cast(values[i, j], sf.dtype)
    else:
        places = scale_bytes(sf, layout)
        for i, j in T.Parallel(values.shape[0], values.shape[1]):
            if row + i < scale_rows(num_rows, layout) and col + j < align(num_cols, 4):
                is_block = row + i < num_rows and col + j < num_cols
                byte = T.cast(T.reinterpret(values[i, j], "uint32") >> T.uint32(23), "uint8")
                if sf.dtype == "float8_e4m3fn":
                    byte = T.reinterpret(T.cast(values[i, j], sf.dtype), "uint8")
                places[scale_place(row + i, col + j, layout)] = T.if_then_else(is_block, byte, T.uint8(0))
        num_last = align(num_cols, 4) - values.shape[1]
        if num_cols <= values.shape[1] and num_last > 0:
            # The fragment ends before the last word of the row does.
            for i, j in T.Parallel(values.shape[0], num_last):
                if row + i < scale_rows(num_rows, layout):
                    places[scale_place(row + i, values.shape[1] + j, layout)] = T.uint8(0)
