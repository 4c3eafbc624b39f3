"""Tiles of the products' kernels on Hopper, and how one is chosen for a shape."""

from dataclasses import dataclass
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
    """What a tile was measured to take on an H100."""

    step: float
    """Nanoseconds of a step of 128 channels, with all SMs at work."""
    end: float
    """Nanoseconds between a tile's last step and the next one's first."""
    bandwidth: float
    """Bytes of operands and results a nanosecond, where these are the bound."""


WIDE = TileShape(128, 256, 4)
FP8_TILES = {
    WIDE: Cost(750, 1600, 2400),
    TileShape(128, 192, 5): Cost(625, 1250, 2400),
    TileShape(128, 128, 5): Cost(460, 750, 2500),
    TileShape(64, 256, 5): Cost(600, 900, 2600),
    TileShape(64, 128, 8, 1): Cost(312, 500, 2650),
    TileShape(64, 64, 12, 1): Cost(235, 500, 2600),
    TileShape(64, 32, 16, 1): Cost(190, 400, 2100),
}
"""docs/tuning/gemm.md has the measurements. All tiles give the same bits."""
BY_K = TileShape(128, 128, 5)
"""The tile where groups are ranges of K."""


class Problem(NamedTuple):
    """What the choice of a tile depends on."""

    num_groups: int
    """Groups of rows with tiles of their own."""
    num_rows: int
    """Rows of such a group."""
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

    return min(FP8_TILES, key=time)


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
