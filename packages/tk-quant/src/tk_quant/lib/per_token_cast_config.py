"""How the kernel of per_token_cast is launched; see per_token_cast.py for a picture."""

from dataclasses import dataclass
from functools import cache
from math import gcd

from tk_core.arch import Arch
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout

CAST, SF_ONLY, PRECOMPUTED = "cast", "sf_only", "precomputed"
"""What the kernel does: data and sf, sf alone, data with sf as given."""
_VEC_OF_CODES = 32


@dataclass(frozen=True)
class PerTokenCastConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once."""
    pieces: int
    """Pieces of a thread: of as many rows, or of one row where a block takes a whole row."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other, each with rows of its own."""
    blocks_per_sm: int = 0
    """Blocks that registers must allow on a multiprocessor; 0 leaves it to the compiler."""
    streaming: bool = False
    """Whether caches are told that x is read once."""
    apart: int = 1
    """How far the rows of a thread are from each other."""

    @staticmethod
    @cache
    def best(
        hidden: int,
        num_per_channels: int,
        x_bits: int,
        fmt: str,
        mode: str,
        round_sf: bool,
        layout: ScaleLayout,
        share_word: bool,
        of_codes: bool,
        arch: Arch,
    ) -> "PerTokenCastConfig":
        """The configuration for a width, a group, the bits of an input element, and what is made of it.

        `share_word` tells words of four sf, `of_codes` what `casts_codes` says.
        """
        if fmt == "e5m6":
            num_lanes = hidden // 8
            pieces = max(min(4, num_lanes // 64), ceil_div(num_lanes, 1024), 1)
            lanes = align(ceil_div(num_lanes, pieces), 32)
            # nvcc takes 63 registers by itself and is as well off, instruction by instruction, with 40.
            return PerTokenCastConfig(8, pieces, lanes, 1, max(1536 // lanes, 1) if x_bits == 16 and pieces <= 4 else 0)
        # 32 bytes of plain input a piece; a float32 group of 128 takes 64 where its four bytes of sf must meet in one
        # warp.
        vec = 8 if x_bits == 32 else 16
        if share_word:
            vec = max(vec, min(num_per_channels, 128) // 8)
        if of_codes:
            vec = _VEC_OF_CODES
        vec = min(vec, num_per_channels)
        if not fits_warp(num_per_channels, vec):
            num_lanes = hidden // vec
            pieces = max(2 if num_lanes >= 128 else 1, ceil_div(num_lanes, 1024))
            return PerTokenCastConfig(vec, pieces, align(ceil_div(num_lanes, pieces), 32), 1)
        pieces = 2 if vec * x_bits >= 256 and not of_codes else 4
        unit = unit_lanes(hidden, num_per_channels, vec, share_word)
        num_lanes = align(ceil_div(hidden, vec), unit)
        lanes = align(ceil_div(num_lanes, ceil_div(num_lanes, 256)), unit)
        rows = align(max(128 // lanes, 1), 32 // gcd(lanes, 32))
        blocks_per_sm, streaming = 0, (fmt == "e2m1" and x_bits == 8) or (mode == SF_ONLY and x_bits == 16)
        if fmt == "e2m1" and x_bits == 16 and mode != SF_ONLY:
            # Four times as much is read as written: with few registers more reads are on their way.
            streaming = True
            blocks_per_sm = max(1344 // (lanes * rows), 1) if round_sf or not arch.has_fp4_convert else 0
        if (layout is ScaleLayout.PACKED_UE8M0 and fmt == "e2m1" and x_bits == 16 and mode == CAST) or of_codes:
            # Down a column the words of sf are neighbours, so a block's rows fill whole sectors of them.
            lanes = max(unit, 8)
            rows, blocks_per_sm = (64 if of_codes else 128) // lanes, 0
        if layout is ScaleLayout.SWIZZLED and fmt == "e2m1" and x_bits == 16 and mode == CAST:
            # Words of rows 32 apart are neighbours: a thread stores four of them at once.
            lanes = max(unit, 8)
            return PerTokenCastConfig(vec, 4, lanes, 128 // lanes, 0, streaming, apart=32)
        return PerTokenCastConfig(vec, pieces, lanes, rows, blocks_per_sm, streaming)


def fits_warp(num_per_channels: int, vec: int) -> bool:
    """Whether a group is a power of two of lanes, at most a warp of them."""
    lanes = num_per_channels // vec
    return lanes <= 32 and lanes & (lanes - 1) == 0


def unit_lanes(hidden: int, num_per_channels: int, vec: int, share_word: bool) -> int:
    """Lanes that must lie in one warp: those of a group, or of the four groups that share a word."""
    return num_per_channels // vec * (4 if share_word and hidden > num_per_channels else 1)


def casts_codes(
    x_fmt: str | None,
    x_block_size: tuple[int, int] | None,
    x_layout: ScaleLayout | None,
    hidden: int,
    fmt: str,
    num_per_channels: int,
    mode: str,
    round_sf: bool,
    arch: Arch,
) -> bool:
    """Whether x is powers of two times e4m3 codes, so that the codes are cast and the scale takes in the power."""
    return (
        x_fmt == "e4m3"
        and x_layout in (ScaleLayout.PACKED_UE8M0, ScaleLayout.SWIZZLED)
        and (x_block_size[1] % _VEC_OF_CODES == 0 or x_block_size[1] >= hidden)
        and fmt == "e2m1"
        and num_per_channels <= 128
        and mode == CAST
        and round_sf
        and not arch.has_fp4_convert
    )
