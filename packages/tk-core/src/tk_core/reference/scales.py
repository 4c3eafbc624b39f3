"""Conversion of scale factors from one layout to another, in plain PyTorch, for any device."""

import torch

from tk_core.scales import ScaleLayout, check_scales, empty_scales

__all__ = ["convert_scales", "decode_ue8m0", "pack_scales", "unpack_scales"]

_QUIET_NAN_BITS = 0x7FC00000
_TWO_TO_MINUS_127_BITS = 0x00400000


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Biased exponents (integers from 0 to 255) to float32: b means 2**(b - 127), exactly; 255 means NaN."""
    codes = codes.to(torch.int32)
    bits = codes << 23
    # 2**-127 is a float32 subnormal: its exponent field is 0, so its mantissa has to be set.
    bits = torch.where(codes == 0, _TWO_TO_MINUS_127_BITS, bits)
    bits = torch.where(codes == 255, _QUIET_NAN_BITS, bits)
    return bits.to(torch.int32).view(torch.float32)


def unpack_scales(sf: torch.Tensor, num_rows: int, num_cols: int) -> torch.Tensor:
    """Scale factors of `(num_rows, num_cols)` blocks in any layout, as a contiguous float32 (num_rows, num_cols)."""
    if sf.dtype is torch.float32:
        return sf.contiguous()
    if sf.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        if sf.ndim == 5:
            row_tiles, col_tiles = sf.shape[:2]
            rows = sf.view(torch.uint8).permute(0, 3, 2, 1, 4).reshape(128 * row_tiles, 4 * col_tiles)
            sf = rows[:num_rows, :num_cols].contiguous().view(sf.dtype)
        if sf.dtype is torch.float8_e4m3fn:
            return sf.to(torch.float32).contiguous()
        return decode_ue8m0(sf.view(torch.uint8))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=sf.device)
    codes = (sf.unsqueeze(-1) >> shifts) & 0xFF
    return decode_ue8m0(codes.reshape(num_rows, 4 * sf.shape[1])[:, :num_cols].contiguous())


def pack_scales(sf: torch.Tensor, layout: ScaleLayout, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Write float32 (R, C) scale factors in `layout`; `dtype` as in `empty_scales`.

    A UE8M0 byte is the exponent field of the float32 value, which is exact for powers of two from 2**-127 on. Infinity
    and NaN become byte 255, which reads back as NaN. For float8_e4m3fn, that format must have all of the values.
    """
    num_rows, num_cols = sf.shape
    packed = empty_scales(sf, num_rows, num_cols, layout, dtype)
    if packed.dtype is torch.float32:
        return packed.copy_(sf)
    if packed.dtype is torch.float8_e4m3fn:
        codes = sf.to(torch.float8_e4m3fn).view(torch.uint8)
        if layout is not ScaleLayout.SWIZZLED:
            packed.view(torch.uint8).copy_(codes)
            return packed
    else:
        codes = (sf.contiguous().view(torch.int32) >> 23) & 0xFF
    if layout is ScaleLayout.SWIZZLED:
        row_tiles, col_tiles = packed.shape[:2]
        padded = torch.zeros((128 * row_tiles, 4 * col_tiles), dtype=torch.uint8, device=sf.device)
        padded[:num_rows, :num_cols] = codes
        tiles = padded.view(row_tiles, 4, 32, col_tiles, 4).permute(0, 3, 2, 1, 4)
        packed.view(torch.uint8).copy_(tiles)
        return packed
    words = sf.new_zeros((num_rows, 4 * packed.shape[1]), dtype=torch.int32)
    words[:, :num_cols] = codes
    words = words.view(num_rows, packed.shape[1], 4)
    return packed.copy_(words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24)


def convert_scales(sf: torch.Tensor, num_rows: int, num_cols: int, layout: ScaleLayout) -> torch.Tensor:
    """Copy scale factors of `(num_rows, num_cols)` blocks, in any layout, to a new tensor in `layout`, on any device.

    float8_e4m3fn scale factors keep their dtype, as they need not be powers of two. Conversion to PACKED_UE8M0, and
    from float32 to SWIZZLED, is exact only for powers of two; see `pack_scales`.

    Raises TypeError or ValueError as `check_scales` does, and ValueError for float8_e4m3fn to a packed layout.
    """
    is_e4m3 = isinstance(sf, torch.Tensor) and sf.dtype is torch.float8_e4m3fn
    check_scales("sf", sf, num_rows, num_cols, sf.device, (torch.float8_e8m0fnu, torch.float8_e4m3fn))
    if is_e4m3 and layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.PACKED_ROW_MAJOR):
        raise ValueError(f"layout: expected one that is not packed for float8_e4m3fn, got {layout.name}")
    values = unpack_scales(sf, num_rows, num_cols)
    return pack_scales(values, layout, torch.float8_e4m3fn if is_e4m3 else None)
