"""Descriptions of a cast's input and of the scale factors that it makes; kernels are compiled for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tk_core import check
from tk_core.scales import ScaleLayout
from tk_quant.lib.quantize import BITS

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1", torch.uint8: "e5m6"}
"""Format of quantized data, by its dtype."""
ELEMENTS = {"e4m3": "float8_e4m3fn", "e2m1": "int8", "e5m6": "uint8"}
"""TileLang's dtype of quantized data, by format."""


def layout_of(sf: Tensor) -> ScaleLayout:
    """Layout of sf as kernels distinguish it: COL_MAJOR for all float32, whose strides are kernel arguments."""
    if sf.ndim == 5:
        return ScaleLayout.SWIZZLED
    if sf.dtype is torch.float8_e4m3fn:
        return ScaleLayout.ROW_MAJOR
    return ScaleLayout.PACKED_UE8M0 if sf.dtype is torch.int32 else ScaleLayout.COL_MAJOR


def flags_of(sf: Tensor) -> dict[str, bool]:
    """Flags with which a reference returns such an sf; any float32 counts as row major, as only its strides differ."""
    layout = layout_of(sf)
    packed = layout is ScaleLayout.PACKED_UE8M0
    return {
        "use_tma_aligned_col_major_sf": packed,
        "use_packed_ue8m0": packed,
        "use_swizzled_sf": layout is ScaleLayout.SWIZZLED,
    }


@dataclass(frozen=True)
class CastInput:
    """Input of a cast or a cast back: a plain tensor, or a pair of data and scale factors."""

    dtype: torch.dtype
    alignment: int
    """Alignment in bytes of the rows of x, from `check.row_alignment`."""
    block_size: tuple[int, int] | None = None
    """(tokens, channels) of a pair that share a scale factor; None for a plain tensor."""
    layout: ScaleLayout | None = None
    """Layout of the pair's scale factors, from `layout_of`."""
    is_nvfp4: bool = False
    """Whether the scale factors are float8_e4m3fn, beside one float32 scale for the whole tensor."""

    @property
    def is_pair(self) -> bool:
        return self.block_size is not None

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return BITS[FORMATS[self.dtype]] if self.is_pair else 8 * self.dtype.itemsize

    @staticmethod
    def of(x: Tensor, x_sf: Tensor | None, block_size: tuple[int, int]) -> "CastInput":
        """Describe x and x_sf, which the op has checked before."""
        if x_sf is None:
            return CastInput(x.dtype, check.row_alignment(x))
        is_nvfp4 = x_sf.dtype is torch.float8_e4m3fn
        return CastInput(x.dtype, check.row_alignment(x), block_size, layout_of(x_sf), is_nvfp4)


@dataclass(frozen=True)
class CastScales:
    """The scale factors that a cast makes."""

    layout: ScaleLayout
    """From `layout_of`."""
    round_sf: bool = False
    """Whether they are rounded up to powers of two."""
    of_tensor: bool = False
    """Whether they are e4m3, beside one float32 scale for the whole tensor (NVFP4)."""

    @property
    def byte_dtype(self) -> str:
        """TileLang's dtype of one-byte scale factors."""
        return "float8_e4m3fn" if self.of_tensor else "float8_e8m0fnu"

    @property
    def in_bytes(self) -> bool:
        return self.of_tensor or self.layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)
