"""Layouts of scale factors: the one thing that the quantizing and the mixture-of-experts packages share.

A quantized tensor is a pair `(data, sf)`; block (r, c) of data is worth `data * sf[r, c]`. For R rows and C columns of
blocks:

    ROW_MAJOR     float32 (R, C), contiguous
    COL_MAJOR     float32 (R, C), strides (1, align(R, 4)), also where C is 1: each column starts on 16 bytes, for TMA
    PACKED_UE8M0  int32 (R, ceil(C / 4)), strides (1, align(R, 4)); byte k of a word (little endian) is the biased
                  exponent of block 4 * col + k: byte b means 2**(b - 127), 255 means NaN; bytes past C are
                  unspecified (written as 0 here)
"""

import enum

import torch

from tk_core.math import align, ceil_div

__all__ = [
    "ScaleLayout",
    "check_scales",
    "decode_ue8m0",
    "empty_scales",
    "pack_scales",
    "scale_layout",
    "unpack_scales",
]

_QUIET_NAN_BITS = 0x7FC00000
_TWO_TO_MINUS_127_BITS = 0x00400000


class ScaleLayout(enum.Enum):
    """How the scale factors of (R, C) blocks lie in memory; see the module's table."""

    ROW_MAJOR = "row_major"
    COL_MAJOR = "col_major"
    PACKED_UE8M0 = "packed_ue8m0"


def scale_layout(use_tma_aligned_col_major_sf: bool, round_sf: bool, use_packed_ue8m0: bool) -> ScaleLayout:
    """The layout that an op's three flags ask for.

    Raises ValueError if `use_packed_ue8m0` comes without `round_sf` (only powers of two fit a byte) or without
    `use_tma_aligned_col_major_sf` (packed words are always column major).
    """
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


def empty_scales(like: torch.Tensor, num_rows: int, num_cols: int, layout: ScaleLayout) -> torch.Tensor:
    """Uninitialized scale factors for `(num_rows, num_cols)` blocks in `layout`, on the device of `like`."""
    if layout is ScaleLayout.ROW_MAJOR:
        return like.new_empty((num_rows, num_cols), dtype=torch.float32)
    strides = (1, align(num_rows, 4))
    if layout is ScaleLayout.COL_MAJOR:
        return like.new_empty_strided((num_rows, num_cols), strides, dtype=torch.float32)
    return like.new_empty_strided((num_rows, ceil_div(num_cols, 4)), strides, dtype=torch.int32)


def check_scales(name: str, sf: torch.Tensor, num_rows: int, num_cols: int, device: torch.device) -> ScaleLayout:
    """The layout of scale factors that a caller gave for `(num_rows, num_cols)` blocks.

    The stride of a dimension with one element or none addresses nothing, so it may be anything. Where both float32
    layouts fit (one column, no elements), the tensor counts as column major only if its strides are exactly those.

    Raises TypeError if `sf` is no float32 or int32 tensor, ValueError on a wrong shape, stride or device.
    """
    if not isinstance(sf, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(sf).__name__}")
    dtype = sf.dtype
    if dtype is not torch.float32 and dtype is not torch.int32:
        raise TypeError(f"{name}: expected dtype torch.float32, or torch.int32 (packed UE8M0), got {dtype}")
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


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Biased exponents (integers from 0 to 255) to float32: b means 2**(b - 127), exactly; 255 means NaN."""
    codes = codes.to(torch.int32)
    bits = codes << 23
    # 2**-127 is a subnormal of float32, which no exponent field alone can say.
    bits = torch.where(codes == 0, _TWO_TO_MINUS_127_BITS, bits)
    bits = torch.where(codes == 255, _QUIET_NAN_BITS, bits)
    return bits.to(torch.int32).view(torch.float32)


def unpack_scales(sf: torch.Tensor, num_rows: int, num_cols: int) -> torch.Tensor:
    """Scale factors of `(num_rows, num_cols)` blocks in any layout, as a contiguous float32 (num_rows, num_cols)."""
    if sf.dtype is torch.float32:
        return sf.contiguous()
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=sf.device)
    codes = (sf.unsqueeze(-1) >> shifts) & 0xFF
    return decode_ue8m0(codes.reshape(num_rows, 4 * sf.shape[1])[:, :num_cols].contiguous())


def pack_scales(sf: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Float32 (R, C) scale factors, written in `layout`.

    PACKED_UE8M0 keeps the exponent field of each value, so it is exact for powers of two from 2**-127; infinity and NaN
    become byte 255, which reads back as NaN.
    """
    num_rows, num_cols = sf.shape
    packed = empty_scales(sf, num_rows, num_cols, layout)
    if layout is not ScaleLayout.PACKED_UE8M0:
        return packed.copy_(sf)
    codes = sf.new_zeros((num_rows, 4 * packed.shape[1]), dtype=torch.int32)
    codes[:, :num_cols] = (sf.contiguous().view(torch.int32) >> 23) & 0xFF
    codes = codes.view(num_rows, packed.shape[1], 4)
    return packed.copy_(codes[..., 0] | codes[..., 1] << 8 | codes[..., 2] << 16 | codes[..., 3] << 24)
