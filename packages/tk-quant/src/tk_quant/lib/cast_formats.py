"""What the kernels of the casts are given: the form of their input and of the scale factors that they make."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tk_core import check
from tk_core.scales import ScaleLayout
from tk_quant.lib.quantize import BITS

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1", torch.uint8: "e5m6"}
"""Format by dtype of the data."""
ELEMENTS = {"e4m3": "float8_e4m3fn", "e2m1": "int8", "e5m6": "uint8"}
"""TileLang's type of the data by format."""


def layout_of(sf: Tensor) -> ScaleLayout:
    """Layout of sf as far as kernels tell them apart: COL_MAJOR stands for all float32, whose strides are arguments."""
    if sf.ndim == 5:
        return ScaleLayout.SWIZZLED
    if sf.dtype is torch.float8_e4m3fn:
        return ScaleLayout.ROW_MAJOR
    return ScaleLayout.PACKED_UE8M0 if sf.dtype is torch.int32 else ScaleLayout.COL_MAJOR


def flags_of(sf: Tensor) -> dict[str, bool]:
    """The flags that make a reference's sf of the same layout; one in columns has the values of one in rows."""
    layout = layout_of(sf)
    packed = layout is ScaleLayout.PACKED_UE8M0
    return {
        "use_tma_aligned_col_major_sf": packed,
        "use_packed_ue8m0": packed,
        "use_swizzled_sf": layout is ScaleLayout.SWIZZLED,
    }


@dataclass(frozen=True)
class CastInput:
    """What is cast, or cast back: a plain tensor, or data and scale factors."""

    dtype: torch.dtype
    alignment: int
    """What `check.row_alignment` says of x."""
    block_size: tuple[int, int] | None = None
    """(tokens, channels) that share a scale factor; None for a plain tensor."""
    layout: ScaleLayout | None = None
    """Of those scale factors, as `layout_of` says."""
    is_nvfp4: bool = False
    """Whether they are float8_e4m3fn, on top of a scale of the whole tensor."""

    @property
    def is_pair(self) -> bool:
        return self.block_size is not None

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return BITS[FORMATS[self.dtype]] if self.is_pair else 8 * self.dtype.itemsize

    @staticmethod
    def of(x: Tensor, x_sf: Tensor | None, block_size: tuple[int, int]) -> "CastInput":
        """That of tensors which an op has checked."""
        if x_sf is None:
            return CastInput(x.dtype, check.row_alignment(x))
        is_nvfp4 = x_sf.dtype is torch.float8_e4m3fn
        return CastInput(x.dtype, check.row_alignment(x), block_size, layout_of(x_sf), is_nvfp4)


@dataclass(frozen=True)
class CastScales:
    """The scale factors that a cast makes."""

    layout: ScaleLayout
    """As `layout_of` says."""
    round_sf: bool = False
    """Whether they are rounded up to powers of two."""
    of_tensor: bool = False
    """NVFP4: whether they are e4m3, on top of a scale of the whole tensor."""

    @property
    def byte_dtype(self) -> str:
        """TileLang's type of scale factors of one byte."""
        return "float8_e4m3fn" if self.of_tensor else "float8_e8m0fnu"

    @property
    def in_bytes(self) -> bool:
        return self.of_tensor or self.layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)
