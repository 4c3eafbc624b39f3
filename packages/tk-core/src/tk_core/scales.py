"""Layouts of scale factors (sf), which the packages for quantization and for mixtures of experts share.

A quantized tensor is a pair `(data, sf)`; a value of block (r, c) is its code times `sf[r, c]`. For R rows and C
columns of blocks:

    ROW_MAJOR     float32 (R, C), contiguous
    COL_MAJOR     float32 (R, C), strides (1, align(R, 4)), also where C is 1: TMA needs each column aligned to 16 bytes
    PACKED_UE8M0  int32 (R, ceil(C / 4)), strides (1, align(R, 4)); byte k of a word (little endian) is the biased
                  exponent of block 4 * col + k: byte b means 2**(b - 127), 255 means NaN; bytes past C are
                  unspecified (written as 0 here)
    PACKED_ROW_MAJOR  the same words, contiguous
    SWIZZLED      one byte a block, float8_e8m0fnu (2**(b - 127), 255 means NaN) or float8_e4m3fn, contiguous
                  (ceil(R / 128), ceil(C / 4), 32, 4, 4), block (r, c) at [r // 128, c // 4, r % 32, r % 128 // 32,
                  c % 4]: the 128 x 4 tiles that Blackwell's block-scaled matrix products read; bytes past R and C are 0

In ROW_MAJOR and COL_MAJOR scale factors may be float8_e4m3fn, too, in COL_MAJOR with strides (1, align(R, 16)).
"""

import enum

import torch

from tk_core import check
from tk_core.math import align, ceil_div

__all__ = ["LIMITS", "ScaleLayout", "check_scales", "empty_scales", "scale_layout"]

LIMITS = {"e4m3": (448.0, 1e-4), "e2m1": (6.0, 6 * 2.0**-126), "e5m6": (65024.0, 1e-4)}
"""By format of quantized data: (largest finite value, least amax, to which a smaller amax is raised)."""


class ScaleLayout(enum.Enum):
    """How the scale factors of (R, C) blocks lie in memory; see the module's table."""

    ROW_MAJOR = "row_major"
    COL_MAJOR = "col_major"
    PACKED_UE8M0 = "packed_ue8m0"
    PACKED_ROW_MAJOR = "packed_row_major"
    SWIZZLED = "swizzled"


def scale_layout(
    use_tma_aligned_col_major_sf: bool, round_sf: bool, use_packed_ue8m0: bool, use_swizzled_sf: bool = False
) -> ScaleLayout:
    """The layout that an op's flags ask for.

    Raises TypeError if a flag is not a bool. Raises ValueError for `use_packed_ue8m0` without `round_sf` (a byte holds
    only powers of two), and for `use_swizzled_sf` with `use_tma_aligned_col_major_sf` or `use_packed_ue8m0`.
    """
    check.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    check.flag("round_sf", round_sf)
    check.flag("use_packed_ue8m0", use_packed_ue8m0)
    check.flag("use_swizzled_sf", use_swizzled_sf)
    if use_swizzled_sf:
        if use_tma_aligned_col_major_sf or use_packed_ue8m0:
            name = "use_tma_aligned_col_major_sf" if use_tma_aligned_col_major_sf else "use_packed_ue8m0"
            raise ValueError(f"{name}: expected False beside use_swizzled_sf, got True")
        return ScaleLayout.SWIZZLED
    if use_packed_ue8m0:
        if not round_sf:
            raise ValueError("use_packed_ue8m0: expected round_sf=True beside it, got round_sf=False")
        return ScaleLayout.PACKED_UE8M0 if use_tma_aligned_col_major_sf else ScaleLayout.PACKED_ROW_MAJOR
    return ScaleLayout.COL_MAJOR if use_tma_aligned_col_major_sf else ScaleLayout.ROW_MAJOR


def _swizzled_shape(num_rows: int, num_cols: int) -> tuple[int, ...]:
    return (ceil_div(num_rows, 128), ceil_div(num_cols, 4), 32, 4, 4)


def empty_scales(
    like: torch.Tensor, num_rows: int, num_cols: int, layout: ScaleLayout, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Uninitialized scale factors for `(num_rows, num_cols)` blocks in `layout`, on the device of `like`.

    By default `dtype` is the layout's own; for ROW_MAJOR, COL_MAJOR and SWIZZLED it may be float8_e4m3fn.
    """
    if layout is ScaleLayout.ROW_MAJOR:
        return like.new_empty((num_rows, num_cols), dtype=dtype or torch.float32)
    if layout is ScaleLayout.SWIZZLED:
        return like.new_empty(_swizzled_shape(num_rows, num_cols), dtype=dtype or torch.float8_e8m0fnu)
    if layout is ScaleLayout.PACKED_ROW_MAJOR:
        return like.new_empty((num_rows, ceil_div(num_cols, 4)), dtype=torch.int32)
    if layout is ScaleLayout.COL_MAJOR:
        dtype = dtype or torch.float32
        return like.new_empty_strided((num_rows, num_cols), (1, align(num_rows, 16 // dtype.itemsize)), dtype=dtype)
    return like.new_empty_strided((num_rows, ceil_div(num_cols, 4)), (1, align(num_rows, 4)), dtype=torch.int32)


def check_scales(
    name: str,
    sf: torch.Tensor,
    num_rows: int,
    num_cols: int,
    device: torch.device,
    byte_dtypes: tuple[torch.dtype, ...] = (),
) -> ScaleLayout:
    """Check the scale factors that a caller gave for `(num_rows, num_cols)` blocks, and return their layout.

    float32 and int32 are always accepted, float8_e8m0fnu (swizzled) and float8_e4m3fn (swizzled, row major or column
    major) only if they are in `byte_dtypes`. In a dimension of size 0 or 1 any stride is accepted, as it addresses
    nothing. A tensor that fits a row-major and a column-major layout (one column, or no elements) counts as column
    major only if its strides are exactly (1, num_rows aligned to 16 bytes).

    Raises TypeError if `sf` is not a tensor of an accepted dtype, ValueError on a wrong shape, stride or device.
    """
    check.plain(name, sf)
    dtype = sf.dtype
    if dtype in byte_dtypes:
        return _check_byte_scales(name, sf, num_rows, num_cols, device)
    if dtype is not torch.float32 and dtype is not torch.int32:
        others = "".join(f", {other}" for other in byte_dtypes)
        raise TypeError(f"{name}: expected dtype torch.float32, or torch.int32 (packed UE8M0){others}, got {dtype}")
    packed = dtype is torch.int32
    expected_shape = (num_rows, ceil_div(num_cols, 4) if packed else num_cols)
    if sf.shape != expected_shape:
        what = f" (packed UE8M0 for {num_rows} x {num_cols} blocks)" if packed else ""
        raise ValueError(f"{name}: expected shape {expected_shape}{what}, got {tuple(sf.shape)}")
    if sf.device != device:
        raise ValueError(f"{name}: expected device {device}, got {sf.device}")
    is_col_major = _is_col_major(name, sf, align(num_rows, 4))
    if packed:
        return ScaleLayout.PACKED_UE8M0 if is_col_major else ScaleLayout.PACKED_ROW_MAJOR
    return ScaleLayout.COL_MAJOR if is_col_major else ScaleLayout.ROW_MAJOR


def _is_col_major(name: str, sf: torch.Tensor, col_stride: int) -> bool:
    """Whether a tensor of two dimensions is column major, its columns this far apart, and not contiguous.

    Raises ValueError if it is neither.
    """
    strides, expected = sf.stride(), (1, col_stride)
    if strides == expected:
        return True
    if sf.is_contiguous():
        return False
    fits = zip(sf.shape, strides, expected, strict=True)
    if sf.numel() and any(size != 1 and got != want for size, got, want in fits):
        raise ValueError(f"{name}: expected strides {(sf.shape[1], 1)} or {expected}, got {strides}")
    return True


def _check_byte_scales(name: str, sf: torch.Tensor, num_rows: int, num_cols: int, device: torch.device) -> ScaleLayout:
    # A list, not a dict: to hash a size, torch.compile would specialize it.
    shapes = [(_swizzled_shape(num_rows, num_cols), ScaleLayout.SWIZZLED)]
    if sf.dtype is torch.float8_e4m3fn:
        shapes.append(((num_rows, num_cols), ScaleLayout.ROW_MAJOR))
    layout = next((layout for shape, layout in shapes if sf.shape == shape), None)
    if layout is None:
        expected = " or ".join(str(shape) for shape, _ in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(sf.shape)}")
    if sf.device != device:
        raise ValueError(f"{name}: expected device {device}, got {sf.device}")
    if layout is ScaleLayout.ROW_MAJOR:
        return ScaleLayout.COL_MAJOR if _is_col_major(name, sf, align(num_rows, 16)) else layout
    if not sf.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {sf.stride()}")
    return layout
