"""Scale factors inside a kernel: computed from amax, loaded and stored in every layout of tk_core.scales.

`sf` is a scale factor, `factor` what x is multiplied by, about 1 / sf. Kernels import this module in their builder, as
it imports TileLang.

nvcc compiles a division to 8 instructions and a branch to the special cases, which keeps it from interleaving several
divisions. Those of `quick_sf_of_amax`, and of the SwiGLU kernels, return the IEEE result bit for bit in a few
instructions without a branch. Let r be an approximate 1 / d. With each bracket and each sum as one fused multiply-add,

    s = r + r * (1 - d * r)                             is 1 / d correctly rounded, for d from 2**-126 to 2**126;
    q = l * s;  quotient = q - (d * q - l) * s          is l / d, if

  - d = 1 + exp(-l) for any float32 l within ±87, with exp as CUDA's or one unit in the last place off, or
  - one of l and d is 448 or 6, and no intermediate result is subnormal.

The bracket is d * q - l and not l - d * q, so that l = -0 gives -0. The tests try all float32. For other l and d the
quotient is corrected once more: the first correction leaves it within a unit in the last place of l / d, from where,
with s correctly rounded, one step gives the IEEE result (Markstein).
"""

from typing import Any

import tilelang.language as T

from tk_core.macros.quantize import INFINITY_BITS, NAN_BITS, sf_of_amax
from tk_core.math import align, ceil_div
from tk_core.scales import LIMITS, ScaleLayout
from tk_quant.cast.config import CastSf

# A factor that an amax is multiplied by, so that neither the product nor its reciprocal is subnormal.
_DOWN = 0.25
_BYTES = (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)


def sf_type(
    num_rows: Any, num_cols: int, layout: ScaleLayout, byte_dtype: str = "float8_e8m0fnu", prefix: str = ""
) -> Any:
    """TileLang type of a kernel argument that holds the scale factors of (num_rows, num_cols) blocks.

    COL_MAJOR and PACKED_UE8M0 have run-time strides, so the same kernel serves row-major float32 and words.
    `byte_dtype` is float8_e4m3fn for e4m3 scale factors, not in PACKED_UE8M0. `prefix` tells the dynamic symbols of
    several such arguments apart.
    """
    if layout is ScaleLayout.SWIZZLED:
        return T.Tensor((T.dynamic(prefix + "sf_row_tiles"), ceil_div(num_cols, 4), 32, 4, 4), byte_dtype)
    if layout is ScaleLayout.ROW_MAJOR:
        return T.Tensor((num_rows, num_cols), "float32" if byte_dtype == "float8_e8m0fnu" else byte_dtype)
    packed = layout is ScaleLayout.PACKED_UE8M0
    strides = tuple(T.dynamic(f"{prefix}sf_{dim}_stride", "int64") for dim in ("row", "col"))
    shape = (num_rows, ceil_div(num_cols, 4) if packed else num_cols)
    unpacked = "float32" if byte_dtype == "float8_e8m0fnu" else byte_dtype
    return T.StridedTensor(shape, strides, "int32" if packed else unpacked)


def rows_of_sf(num_rows: Any, layout: ScaleLayout) -> Any:
    """Rows of sf that a kernel has to write: for swizzled sf whole tiles of 128 rows, zeros after the last block."""
    return T.ceildiv(num_rows, 128) * 128 if layout is ScaleLayout.SWIZZLED else num_rows


@T.macro
def nvfp4_sf_of_amax(amax: T.int32, tensor_sf: T.float32) -> tuple[T.float32, T.float32]:
    """`(sf, factor)` of an NVFP4 group: sf, beside tensor_sf, is e4m3, at least 2**-9; NaN if amax is not finite."""
    exact, sf = T.alloc_var("float32"), T.alloc_local((1,), "float8_e4m3fn")
    exact = T.reinterpret(amax, "float32") / T.float32(LIMITS["e2m1"][0]) / tensor_sf
    # Written so that NaN stays NaN.
    exact = T.if_then_else(exact < T.float32(2.0**-9), T.float32(2.0**-9), exact)
    exact = T.if_then_else(amax < INFINITY_BITS, exact, T.reinterpret(T.uint32(NAN_BITS), "float32"))
    sf[0] = T.cast(exact, "float8_e4m3fn")
    rounded = T.cast(sf[0], "float32")
    return rounded, T.float32(1) / (rounded * tensor_sf)


@T.macro
def e4m3_sf_of_amax(amax: T.int32, fmt: str) -> tuple[T.float32, T.float32]:
    """`(sf, factor)` of a block whose sf is e4m3; amax is at least 2**-9 times the largest value of fmt.

    sf saturates at 448; it is NaN if amax is not finite.
    """
    exact, sf = T.alloc_var("float32"), T.alloc_local((1,), "float8_e4m3fn")
    exact = T.reinterpret(amax, "float32") / T.float32(LIMITS[fmt][0])
    exact = T.if_then_else(amax < INFINITY_BITS, exact, T.reinterpret(T.uint32(NAN_BITS), "float32"))
    sf[0] = T.cast(exact, "float8_e4m3fn")
    rounded = T.cast(sf[0], "float32")
    return rounded, T.float32(1) / rounded


@T.macro
def reciprocal(d: T.float32) -> T.float32:
    """1 / d, for d from 2**-126 to 2**126."""
    r = T.fast_rcp(d)
    return T.fma(r, T.fma(-d, r, T.float32(1)), r)


@T.macro
def quotient(x: T.float32, d: T.float32, s: T.float32) -> T.float32:
    """x / d, given s = 1 / d, for the x and d of the module's text."""
    q = x * s
    return T.fma(-T.fma(d, q, -x), s, q)


@T.macro
def refined_quotient(x: T.float32, d: T.float32, s: T.float32) -> T.float32:
    """x / d, given s = 1 / d, for d from 2**-126 to 2**126 and any x whose quotient is no subnormal, or for d = 2."""
    q = quotient(x, d, s)
    return T.fma(-T.fma(d, q, -x), s, q)


@T.macro
def _quick_sf(amax: T.int32, fmt: str) -> tuple[T.float32, T.float32]:
    largest, value = LIMITS[fmt][0], T.reinterpret(amax, "float32")
    sf = quotient(value, T.float32(largest), T.float32(1 / largest))
    scaled = value * T.float32(_DOWN)
    factor = quotient(T.float32(largest * _DOWN), scaled, reciprocal(scaled))
    is_infinite = amax == INFINITY_BITS
    return T.if_then_else(is_infinite, value, sf), T.if_then_else(is_infinite, T.float32(0), factor)


def quick_sf_of_amax(amax: Any, fmt: str, round_sf: bool) -> tuple[Any, Any]:
    """The same bits as `sf_of_amax`, for e4m3 and e2m1, by divisions without a branch."""
    return sf_of_amax(amax, fmt, True) if round_sf else _quick_sf(amax, fmt)


def sf_of_group(amax: Any, tensor_sf: T.Buffer, fmt: str, of_sf: CastSf, is_quick: bool = True) -> tuple[Any, Any]:
    """`(sf, factor)` of a group by the kind of its scale factors; with is_quick, e2m1's without a branch."""
    if of_sf.is_nvfp4:
        return nvfp4_sf_of_amax(amax, tensor_sf[0])
    if of_sf.is_e4m3:
        return e4m3_sf_of_amax(amax, fmt)
    if is_quick and fmt == "e2m1" and not of_sf.round_sf:
        return quick_sf_of_amax(amax, fmt, False)
    return sf_of_amax(amax, fmt, of_sf.round_sf)


def float_of_ue8m0(exponent: Any) -> Any:
    """float32 expression of a UE8M0 scale factor, a biased exponent (uint8): 0 is 2**-127, 255 is NaN."""
    wide = T.cast(exponent, "uint32")
    bits = T.if_then_else(wide == 0, T.uint32(0x00400000), wide << T.uint32(23))
    return T.reinterpret(T.if_then_else(wide == 255, T.uint32(NAN_BITS), bits), "float32")


def sf_bytes(sf: T.Buffer, layout: ScaleLayout) -> T.Buffer:
    """View sf as bytes: packed (rows, words, 4), swizzled (row tiles, column tiles, 32, 4, 4); float32 as it is."""
    if layout is ScaleLayout.PACKED_UE8M0:
        row_stride, col_stride = sf.strides
        return T.view(sf, (*sf.shape, 4), "uint8", strides=(4 * row_stride, 4 * col_stride, 1))
    if layout is ScaleLayout.SWIZZLED:
        return T.view(sf, sf.shape, "uint8")
    return sf


def sf_index(row: Any, col: Any, layout: ScaleLayout) -> tuple[Any, ...]:
    """Index in the result of `sf_bytes` of the scale factor of block (row, col)."""
    if layout is ScaleLayout.PACKED_UE8M0:
        return row, col // 4, col % 4
    if layout is ScaleLayout.SWIZZLED:
        return row // 128, col // 4, row % 32, row % 128 // 32, col % 4
    return row, col


def load_sf(sf: T.Buffer, row: Any, col: Any, layout: ScaleLayout) -> Any:
    """float32 expression of the scale factor of block (row, col); `sf` is the result of `sf_bytes`."""
    value = sf[sf_index(row, col, layout)]
    if sf.dtype == "float8_e4m3fn":
        return T.cast(value, "float32")
    return float_of_ue8m0(value) if layout in _BYTES else value


@T.macro
def store_sf(
    sf: T.Buffer, values: T.Buffer, row: T.int32, col: T.int32, num_rows: T.int32, num_cols: int, layout: ScaleLayout
) -> None:
    """Store a fragment of float32 scale factors (rows, columns) of the blocks from (row, col) on.

    For an e8m0 sf the values are powers of two, infinity or NaN; for an e4m3 sf they are e4m3 values. Values outside
    the (num_rows, num_cols) blocks are skipped. One-byte layouts are padded with zeros: the bytes after the last column
    if the fragment has all columns or reaches that far; and the rows of a swizzled sf after the last block, up to
    `rows_of_sf`, if the fragment has them.
    """
    if layout not in _BYTES:
        for i, j in T.Parallel(values.shape[0], values.shape[1]):
            if row + i < num_rows and col + j < num_cols:
                sf[row + i, col + j] = T.cast(values[i, j], sf.dtype)
    else:
        codes = sf_bytes(sf, layout)
        for i, j in T.Parallel(values.shape[0], values.shape[1]):
            if row + i < rows_of_sf(num_rows, layout) and col + j < align(num_cols, 4):
                is_block = row + i < num_rows and col + j < num_cols
                byte = T.cast(T.reinterpret(values[i, j], "uint32") >> T.uint32(23), "uint8")
                if sf.dtype == "float8_e4m3fn":
                    byte = T.reinterpret(T.cast(values[i, j], sf.dtype), "uint8")
                codes[sf_index(row + i, col + j, layout)] = T.if_then_else(is_block, byte, T.uint8(0))
        num_last = align(num_cols, 4) - values.shape[1]
        if num_cols <= values.shape[1] and num_last > 0:
            # The fragment ends before the last word of the row does.
            for i, j in T.Parallel(values.shape[0], num_last):
                if row + i < rows_of_sf(num_rows, layout):
                    codes[sf_index(row + i, values.shape[1] + j, layout)] = T.uint8(0)
