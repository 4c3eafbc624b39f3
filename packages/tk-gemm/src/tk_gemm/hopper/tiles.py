"""Tiles of the products' kernels on Hopper, and how one is chosen for a shape."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tk_core.math import ceil_div
from tk_gemm.kernels import BLOCK_K, Addend, Kind


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
    on_demand: bool = False
    """Whether a thread block asks for its next tile: see scheduler.py."""

    @property
    def loaded_m(self) -> int:
        """Rows of A that are loaded for a tile."""
        return self.max_rows or self.block_m

    def sides(self, addend: Addend | None) -> tuple[str, ...]:
        """What each loading warp loads: one takes as long to issue A's and B's loads as a small tile's step takes."""
        return ("a", "b") if self.block_m * self.block_n <= 128 * 128 and addend != "d" else ("ab",)

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
    """What a tile takes on an H100: fitted to measurements of 55 products, so that the model below chooses well."""

    step: float
    """Nanoseconds of a step, of 128 channels in FP8 or 64 in BF16, with all SMs at work."""
    end: float
    """Nanoseconds between a tile's last step and the next one's first."""
    bandwidth: float
    """Bytes of operands and results a nanosecond, where these are the bound."""


L2_BANDWIDTH = 9000
"""Bytes of tiles' operands a nanosecond that all SMs together get from L2."""
WIDE = TileShape(128, 256, 4)
TILES = {
    WIDE: Cost(730, 1300, 2450),
    TileShape(128, 192, 4): Cost(520, 1300, 2400),
    TileShape(128, 128, 5): Cost(380, 1000, 2350),
    TileShape(128, 64, 8): Cost(250, 600, 2400),
    TileShape(64, 256, 5): Cost(390, 1300, 2500),
    TileShape(64, 128, 8, 1): Cost(240, 900, 2700),
    TileShape(64, 64, 12, 1): Cost(210, 900, 2650),
    TileShape(64, 32, 16, 1): Cost(150, 600, 2400),
    TileShape(64, 16, 16, 1): Cost(120, 600, 2400),
}
"""For FP8, and for BF16, whose steps have as many bytes, half as many channels, and take the tensor core as long.
docs/tuning/gemm.md has the measurements. All tiles give the same bits."""
WIDE_LONG = replace(WIDE, num_stages=3)
"""In place of the widest in FP8, for 2048 channels and more: blocks that run less far ahead find more of each other's
loads in L2, and a whole tile's results have room in shared memory."""
ON_DEMAND = replace(WIDE_LONG, on_demand=True)
"""For groups of rows one after the other, where they wait for memory, and for long."""
_LONG = 400_000
"""Nanoseconds from which this pays: the counter of tiles that are taken has to be zeroed first."""
FEW_ROWS = 8, 32
"""Groups of at most so many rows get tiles that load only this many: for a tile's rest TMA would write zeros, which
takes it longer than loading rows."""
BY_K = TileShape(128, 128, 5)
"""The tile where groups are ranges of K and threads add C: the wider one has no registers for it."""
BY_K_TILES = {BY_K: Cost(560, 5600, 2400), WIDE_LONG: Cost(990, 12300, 2400)}
"""The tiles where groups are ranges of K otherwise. Ends are those of float32 sums which are added to D."""


class Problem(NamedTuple):
    """What the choice of a tile depends on."""

    num_groups: int
    """Groups of rows with tiles of their own, or of channels."""
    num_rows: int
    """Rows that such a group has, as far as is known."""
    max_rows: int
    """Rows that it may have."""
    num_cols: int
    num_channels: int
    """Of one group, where groups are ranges of K."""
    num_weights: int
    """Matrices B that are read."""
    itemsize: int = 1
    """Bytes of an operand's element."""


def _times(tile: TileShape, cost: Cost, x: Problem, num_sms: int) -> tuple[float, float]:
    """Nanoseconds that tiles take, and that memory takes.

    Tiles take as long as those of the busiest SM, or as L2 takes to bring all their operands.
    """
    rows, row_bytes = x.num_groups * x.num_rows, x.num_channels * x.itemsize
    num_bytes = x.num_weights * x.num_cols * row_bytes + rows * (row_bytes + 2 * x.num_cols)
    num_tiles = x.num_groups * ceil_div(x.num_rows, tile.block_m) * ceil_div(x.num_cols, tile.block_n)
    busiest = ceil_div(num_tiles, num_sms) * (row_bytes / BLOCK_K * cost.step + cost.end)
    from_l2 = num_tiles * (tile.block_m + tile.block_n) * row_bytes / L2_BANDWIDTH
    return max(busiest, from_l2), num_bytes / cost.bandwidth


def fastest(tiles: Mapping[TileShape, Cost], x: Problem, num_sms: int) -> TileShape:
    """The tile with the least time: the longer of tiles and memory, and a tenth of the other."""

    def time(tile: TileShape) -> float:
        times = _times(tile, tiles[tile], x, num_sms)
        return max(times) + 0.1 * min(times)

    return min(tiles, key=time)


def widest_tile(kind: Kind, x: Problem, num_sms: int) -> TileShape:
    """The widest tile of products with many channels."""
    tiles_take, memory_takes = _times(WIDE_LONG, TILES[WIDE], x, num_sms)
    return ON_DEMAND if kind in ("ids", "psum") and memory_takes > max(tiles_take, _LONG) else WIDE_LONG


def tile_of_rows(kind: Kind, x: Problem, num_sms: int) -> TileShape:
    """The tile of a product whose groups, if it has any, are rows."""
    if widest_tile(kind, x, num_sms) == ON_DEMAND:
        return ON_DEMAND
    tile = fastest(TILES, x, num_sms)
    if tile == WIDE and x.itemsize == 1 and x.num_channels >= 2048:
        return WIDE_LONG
    few = next((few for few in FEW_ROWS if x.max_rows <= few < tile.block_m), None)
    return replace(tile, max_rows=few)


def by_k_tile(x: Problem, addend: Addend | None, num_sms: int) -> TileShape:
    """The tile of an FP8 product whose groups are ranges of K."""
    return BY_K if addend == "c" else fastest(BY_K_TILES, x, num_sms)
