"""What the kernels of the casts are compiled for: their input, the scale factors that they write, and their tiles."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.cast.format import BITS, FORMATS

TILE_ROWS = 128
"""Tokens of a tile in the kernels that cast by channel."""
OWN_GUARDS_AND_BARRIERS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_thread_storage_sync": True,
}
"""Pass configs of kernels that check bounds and place barriers themselves, and never reuse a shared array."""
_WARP = 32
_MAX_THREADS = 512
_MIN_THREADS = 128
_TOKENS = 4


def layout_of(sf: Tensor) -> ScaleLayout:
    """Layout of sf as kernels distinguish it: strides are kernel arguments for all float32, which is COL_MAJOR, and for
    all int32, which is PACKED_UE8M0.
    """
    if sf.ndim == 5:
        return ScaleLayout.SWIZZLED
    if sf.dtype is torch.float8_e4m3fn:
        return ScaleLayout.ROW_MAJOR if sf.is_contiguous() else ScaleLayout.COL_MAJOR
    return ScaleLayout.PACKED_UE8M0 if sf.dtype is torch.int32 else ScaleLayout.COL_MAJOR


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
    has_e4m3_sf: bool = False
    """Whether the scale factors are float8_e4m3fn alone."""

    @property
    def is_pair(self) -> bool:
        return self.block_size is not None

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return BITS[FORMATS[self.dtype]] if self.is_pair else 8 * self.dtype.itemsize

    @staticmethod
    def of(x: Tensor, x_sf: Tensor | None, block_size: tuple[int, int], has_tensor_sf: bool = False) -> "CastInput":
        """Describe x and x_sf, which the op has checked before."""
        if x_sf is None:
            return CastInput(x.dtype, check.row_alignment(x))
        is_e4m3 = x_sf.dtype is torch.float8_e4m3fn
        of_sf = layout_of(x_sf), is_e4m3 and has_tensor_sf, is_e4m3 and not has_tensor_sf
        return CastInput(x.dtype, check.row_alignment(x), block_size, *of_sf)


@dataclass(frozen=True)
class CastSf:
    """The scale factors of a cast."""

    layout: ScaleLayout
    """From `layout_of`."""
    round_sf: bool = False
    """Whether they are rounded up to powers of two."""
    is_nvfp4: bool = False
    """Whether they are e4m3, beside one float32 scale for the whole tensor (NVFP4)."""
    is_given: bool = False
    """Whether the cast reads them, rather than making them."""
    is_e4m3: bool = False
    """Whether they are e4m3 alone."""

    @property
    def byte_dtype(self) -> str:
        """TileLang's dtype of one-byte scale factors."""
        return "float8_e4m3fn" if self.is_nvfp4 or self.is_e4m3 else "float8_e8m0fnu"

    @property
    def in_bytes(self) -> bool:
        return self.is_nvfp4 or self.is_e4m3 or self.layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)


@dataclass(frozen=True)
class TileConfig:
    """Launch knobs: the tile that a thread block holds in registers. Elements past the tensor's end are skipped.

    A block is the elements that share a scale factor. One that needs more than a warp is split in parts.
    """

    blocks_down: int
    """Blocks of the tile along tokens; or parts of one block."""
    block_tokens: int
    """Tokens of a block, or of a part."""
    blocks_across: int
    """Blocks of the tile along channels; or parts of one block."""
    block_channels: int
    """Channels of a block, or of a part."""
    vec: int
    """Neighbouring channels that a thread holds: a vector."""
    thread_rows: int
    """Rows of threads in a block or a part: thread row r holds its tokens r, r + thread_rows, and so on."""
    threads: int
    blocks_per_sm: int = 0
    """Thread blocks that must fit on an SM, which caps registers; 0 leaves registers to the compiler."""

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """Shape of the tile: (blocks down, tokens of a block, blocks across, channels of a block)."""
        return self.blocks_down, self.block_tokens, self.blocks_across, self.block_channels

    @property
    def parts(self) -> tuple[int, int]:
        """(down, across): blocks of the tile, or parts if the tile is one block."""
        return self.blocks_down, self.blocks_across

    def splits(self, block_size: tuple[int, int]) -> bool:
        """Whether the tile is one block of this size, split in parts of a warp each."""
        return self.block_tokens < block_size[0] or self.block_channels < block_size[1]

    def blocks_of_tile(self, block_size: tuple[int, int]) -> tuple[int, int]:
        """(down, across): whole blocks of this size in the tile."""
        return (1, 1) if self.splits(block_size) else self.parts

    @property
    def tokens(self) -> int:
        """Tokens of the tile."""
        return self.blocks_down * self.block_tokens

    @property
    def channels(self) -> int:
        """Channels of the tile."""
        return self.blocks_across * self.block_channels

    @staticmethod
    @cache
    def best(
        hidden: int, block_size: tuple[int, int], x_bits: int, fmt: str, with_data: bool, in_bytes: bool, arch: Arch
    ) -> "TileConfig":
        """The configuration for x of `hidden` channels with `x_bits` bits an element, cast to `fmt` by blocks.

        `with_data`: the kernel writes data, not only scale factors; `in_bytes`: a scale factor is one byte.
        """
        to_e2m1 = fmt == "e2m1" and with_data
        block_tokens, block_channels = block_size
        if block_tokens > 1:
            return TileConfig._of_blocks(block_size, x_bits, to_e2m1, arch)
        vec = 8 if x_bits == 32 else 16
        if block_channels == hidden and hidden > _WARP * vec:
            return TileConfig._of_rows(ceil_div(hidden, _WARP * vec), vec, fmt)
        config = TileConfig._of_groups(hidden, block_channels, vec, in_bytes)
        # H200, 8192 x 7168: writing e2m1 data alone takes 39 us with 36 registers, 48 with as many as nvcc picks.
        return replace(config, blocks_per_sm=1792 // config.threads if to_e2m1 else 0)

    @staticmethod
    def _of_groups(hidden: int, group: int, vec: int, in_bytes: bool) -> "TileConfig":
        """Tiles of groups of channels: as many groups of a row as the limit on threads allows.

        H200, bfloat16, 8192 x 7168, groups of 128, by rows x channels of a tile: with 16 channels a thread 1 x 7168
        takes 45.3 us, 1 x 3584 46.2, 8 x 1024 46.5; with 8 channels a thread 4 x 1024 takes 46.9.
        """
        if group < vec:
            lanes, size, unit = 1, group, vec // group
        else:
            # The threads that reduce one amax must be a power of two in number.
            lanes = 1 << (ceil_div(group, vec) - 1).bit_length()
            size, unit = lanes * vec, 1
        num_groups = align(ceil_div(hidden, size), unit)
        num_tiles = ceil_div(num_groups * size // vec, _MAX_THREADS)
        across = align(ceil_div(num_groups, num_tiles), unit)
        whole_warps = _WARP // lanes * unit
        if num_tiles > 1:
            # One-byte scale factors are written in whole words of four.
            across = align(across, max(4 if in_bytes else 1, whole_warps))
        elif across * size // vec > _MAX_THREADS // 4:
            across = align(across, whole_warps)
        row_threads = across * size // vec
        rows = next(n for n in range(1, 129) if n * row_threads >= _MIN_THREADS and n * row_threads % _WARP == 0)
        return TileConfig(rows, 1, across, size, vec, 1, rows * row_threads)

    @staticmethod
    def _of_rows(num_parts: int, vec: int, fmt: str) -> "TileConfig":
        """Tiles of one row that is one group, split in parts as wide as a warp.

        H200, 8192 x 7168, e5m6: bfloat16 takes 51.5 us with 7 warps, 64.8 with 14; float32 75.6 with 7, 141 with 28.
        """
        parts_of_warp = ceil_div(num_parts, _WARP)
        if fmt == "e5m6":
            parts_of_warp = max(parts_of_warp, min(ceil_div(num_parts, 8), 4))
        num_warps = ceil_div(num_parts, parts_of_warp)
        return TileConfig(1, 1, align(num_parts, num_warps), _WARP * vec, vec, 1, _WARP * num_warps)

    @staticmethod
    def _of_blocks(block_size: tuple[int, int], x_bits: int, to_e2m1: bool, arch: Arch) -> "TileConfig":
        """Tiles of blocks of several tokens, up to four a thread; a block of more than a warp is split in parts."""
        block_tokens, block_channels = block_size
        vec = 16 if x_bits == 16 and block_channels > 1 else 8
        lanes = max(block_channels, 64) // vec
        thread_rows = max(block_tokens // _TOKENS, 1)
        down, across, warp_rows = 1, lanes * vec // block_channels, thread_rows
        if across == 1 and thread_rows * lanes > _WARP:
            warp_rows = _WARP // lanes
            down = thread_rows // warp_rows
            block_tokens //= down
        else:
            down = max((64 if to_e2m1 else 256) // (lanes * thread_rows), 1)
        threads = down * warp_rows * lanes
        # nvcc takes 80 registers unless capped. With 64, an SM holds 1024 threads instead of 768, with more loads in
        # flight; compiled for sm_100a, some of these kernels would spill registers.
        most_threads = 1024 if arch.sm < 100 else 640 if to_e2m1 else 768
        blocks_per_sm = most_threads // threads if min(block_size) >= 32 else 0
        return TileConfig(down, block_tokens, across, block_channels, vec, warp_rows, threads, blocks_per_sm)
