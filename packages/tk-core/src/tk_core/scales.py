"""Layouts of scale factors (sf), which the packages for quantization and for mixtures of experts share.

A quantized tensor is a pair `(data, sf)`; a value of block (r, c) is its code times `sf[r, c]`. For R rows and C
columns of blocks:

    ROW_MAJOR     float32 (R, C), contiguous
    COL_MAJOR     float32 (R, C), strides (1, align(R, 4)), also where C is 1: TMA needs each column aligned to 16 bytes
    PACKED_UE8M0  int32 (R, ceil(C / 4)), strides (1, align(R, 4)); byte k of a word (little endian) is the biased
                  exponent of block 4 * col + k: byte b means 2**(b - 127), 255 means NaN; bytes past C are
                  unspecified (written as 0 here)
    SWIZZLED      one byte a block, float8_e8m0fnu (2**(b - 127), 255 means NaN) or float8_e4m3fn, contiguous
                  (ceil(R / 128), ceil(C / 4), 32, 4, 4), block (r, c) at [r // 128, c // 4, r % 32, r % 128 // 32,
                  c % 4]: the 128 x 4 tiles that Blackwell's block-scaled matrix products read; bytes past R and C are 0
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
    SWIZZLED = "swizzled"


def scale_layout(
    use_tma_aligned_col_major_sf: bool, round_sf: bool, use_packed_ue8m0: bool, use_swizzled_sf: bool = False
) -> ScaleLayout:
    """The layout that an op's flags ask for.

    Raises TypeError if a flag is not a bool. Raises ValueError for `use_packed_ue8m0` without `round_sf` (a byte holds
    only powers of two) or without `use_tma_aligned_col_major_sf` (packed words are always column major), and for
    `use_swizzled_sf` with `use_tma_aligned_col_major_sf` or `use_packed_ue8m0`.
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
        if not use_tma_aligned_col_major_sf:
            raise ValueError(
                "use_packed_ue8m0: expected use_tma_aligned_col_major_sf=True beside it, "
                "got use_tma_aligned_col_major_sf=False"
            )
        return ScaleLayout.PACKED_UE8M0
    return ScaleLayout.COL_MAJOR if use_tma_aligned_col_major_sf else ScaleLayout.ROW_MAJOR


def _swizzled_shape(num_rows: int, num_cols: int) -> tuple[int, ...]:
    return (ceil_div(num_rows, 128), ceil_div(num_cols, 4), 32, 4, 4)


def empty_scales(
    like: torch.Tensor, num_rows: int, num_cols: int, layout: ScaleLayout, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Uninitialized scale factors for `(num_rows, num_cols)` blocks in `layout`, on the device of `like`.

    By default `dtype` is the layout's own; for ROW_MAJOR and SWIZZLED it may be float8_e4m3fn.
    """
    if layout is ScaleLayout.ROW_MAJOR:
        return like.new_empty((num_rows, num_cols), dtype=dtype or torch.float32)
    if layout is ScaleLayout.SWIZZLED:
        return like.new_empty(_swizzled_shape(num_rows, num_cols), dtype=dtype or torch.float8_e8m0fnu)
    strides = (1, align(num_rows, 4))
    if layout is ScaleLayout.COL_MAJOR:
        return like.new_empty_strided((num_rows, num_cols), strides, dtype=torch.float32)
    return like.new_empty_strided((num_rows, ceil_div(num_cols, 4)), strides, dtype=torch.int32)


def check_scales(
    name: str,
    sf: torch.Tensor,
    num_rows: int,
    num_cols: int,
    device: torch.device,
    byte_dtypes: tuple[torch.dtype, ...] = (),
) -> ScaleLayout:
    """Check the scale factors that a caller gave for `(num_rows, num_cols)` blocks, and return their layout.

    float32 and int32 are always accepted, float8_e8m0fnu (swizzled) and float8_e4m3fn (swizzled or row major) only if
    they are in `byte_dtypes`. In a dimension of size 0 or 1 any stride is accepted, as it addresses nothing. A float32
    tensor that fits both layouts (one column, or no elements) counts as column major only if its strides are exactly
    (1, align(num_rows, 4)).

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
    strides = sf.stride()
    col_major_strides = (1, align(num_rows, 4))
    is_col_major = strides == col_major_strides
    if not is_col_major and not packed and sf.is_contiguous():
        return ScaleLayout.ROW_MAJOR
    if not is_col_major:
        fits = zip(expected_shape, strides, col_major_strides, strict=True)
        is_col_major = sf.numel() == 0 or all(size == 1 or got == want for size, got, want in fits)
    if not is_col_major:
        contiguous = "" if packed else f"{(num_cols, 1)} or "
        raise ValueError(f"{name}: expected strides {contiguous}{col_major_strides}, got {strides}")
    return ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.COL_MAJOR


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
    if not sf.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {sf.stride()}")
    return layout
