"""Tiles of the products' kernels on Hopper, and how one is chosen for a shape."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tk_core.math import ceil_div
from tk_gemm.kernels import BLOCK_K


@dataclass(frozen=True)
class TileShape:
    """Rows and columns of a tile, stages of the ring, warpgroups that multiply: each has 64 rows.

    Two warpgroups split the rows of a tile of 128, or the columns of one of 64.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warpgroups: int = 2
    max_rows: int | None = None
    """Rows that A has at most, if the tile has more: the others are neither loaded nor filled with zeros."""

    @property
    def loaded_m(self) -> int:
        """Rows of A that are loaded for a tile."""
        return self.max_rows or self.block_m

    @property
    def warpgroup_n(self) -> int:
        """Columns of a warpgroup."""
        return self.block_n * self.block_m // (64 * self.num_warpgroups)

    @property
    def factor_n(self) -> int:
        """Columns with one scale factor: 64 where tiles begin at odd multiples of 64 columns."""
        return 64 if self.block_n == 192 else min(self.block_n, 128)

    @property
    def num_factors(self) -> int:
        """Scale factors of a step's columns."""
        return ceil_div(self.block_n, self.factor_n)

    def corner(self, warpgroup: int) -> tuple[int, int]:
        """First row and column of a warpgroup within the tile."""
        return (warpgroup * 64, 0) if self.block_m == 128 else (0, warpgroup * self.warpgroup_n)


class Cost(NamedTuple):
    """What a tile takes on an H100: fitted to measurements of 53 shapes, so that the model below chooses well."""

    step: float
    """Nanoseconds of a step of 128 channels, with all SMs at work."""
    end: float
    """Nanoseconds between a tile's last step and the next one's first."""
    bandwidth: float
    """Bytes of operands and results a nanosecond, where these are the bound."""


WIDE = TileShape(128, 256, 3)
FP8_TILES = {
    WIDE: Cost(800, 1800, 2500),
    TileShape(128, 192, 4): Cost(600, 1100, 2650),
    TileShape(128, 128, 5): Cost(400, 1700, 2600),
    TileShape(64, 256, 5): Cost(400, 1900, 2750),
    TileShape(64, 128, 8, 1): Cost(240, 1300, 2400),
    TileShape(64, 64, 12, 1): Cost(190, 400, 2350),
    TileShape(64, 32, 16, 1): Cost(170, 1400, 2200),
    TileShape(64, 16, 16, 1): Cost(150, 1400, 2200),
}
"""docs/tuning/gemm.md has the measurements. All tiles give the same bits."""
FEW_ROWS = 32
"""Groups of at most so many rows get tiles that load only this many: for a tile's rest TMA would write zeros, which
takes it longer than loading rows."""
BY_K = TileShape(128, 128, 5)
"""The tile where groups are ranges of K."""


class Problem(NamedTuple):
    """What the choice of a tile depends on."""

    num_groups: int
    """Groups of rows with tiles of their own."""
    num_rows: int
    """Rows that such a group has, as far as is known."""
    max_rows: int
    """Rows that it may have."""
    num_cols: int
    num_channels: int
    num_weights: int
    """Matrices B that are read."""


def fp8_tile(x: Problem, num_sms: int) -> TileShape:
    """The tile with the least time: the longer of the busiest SM's steps and of the bytes, and a tenth of the other."""
    rows = x.num_groups * x.num_rows
    num_bytes = x.num_weights * x.num_cols * x.num_channels + rows * (x.num_channels + 2 * x.num_cols)

    def time(tile: TileShape) -> float:
        cost = FP8_TILES[tile]
        num_tiles = x.num_groups * ceil_div(x.num_rows, tile.block_m) * ceil_div(x.num_cols, tile.block_n)
        steps = ceil_div(num_tiles, num_sms) * (x.num_channels / BLOCK_K * cost.step + cost.end)
        loads = num_bytes / cost.bandwidth
        return max(steps, loads) + 0.1 * min(steps, loads)

    tile = min(FP8_TILES, key=time)
    return replace(tile, max_rows=FEW_ROWS) if tile.block_m > FEW_ROWS >= x.max_rows else tile


BF16_TILES = {
    TileShape(128, 256, 4): 1.0,
    TileShape(128, 192, 4): 0.8,
    TileShape(128, 128, 4): 0.6,
    TileShape(64, 256, 5): 0.62,
    TileShape(64, 128, 8): 0.44,
}
"""Time of a step for each tile, relative to the widest: estimates, from those of the FP8 products, whose steps have as
many bytes and take the tensor core as long."""


def bf16_tile(num_groups: int, num_rows: int, num_cols: int, num_sms: int) -> TileShape:
    """The tile with the least time on the busiest SM, for groups of `num_rows` rows."""

    def time(shape: TileShape) -> float:
        num_tiles = num_groups * ceil_div(num_rows, shape.block_m) * ceil_div(num_cols, shape.block_n)
        return ceil_div(num_tiles, num_sms) * BF16_TILES[shape]

    return min(BF16_TILES, key=time)
