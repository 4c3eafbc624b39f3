"""Tiles of the FP8 products' kernels, and how one is picked for a shape."""

from dataclasses import dataclass
from typing import Literal

import torch

from tk_core.math import ceil_div

BLOCK_K = 128
STRIP = 8
"""Height of a strip in units of 128 rows; a strip's tiles are taken one column of tiles after the other."""

Kind = Literal["dense", "ids", "psum", "masked"]
"""How the weights of a tile's rows are found: one matrix for all, an id a row, ends of groups, or a buffer a group."""


@dataclass(frozen=True)
class ProductConfig:
    """Rows and columns of a tile, and stages of the ring."""

    block_m: int
    block_n: int
    num_stages: int


WIDE = ProductConfig(128, 256, 4)
"""The tile of fp8_product_wide_kernel; all others are fp8_product_kernel's."""
CONFIGS = {
    WIDE: 1.0,
    ProductConfig(128, 128, 5): 0.55,
    ProductConfig(64, 256, 4): 0.58,
    ProductConfig(64, 128, 8): 0.35,
    ProductConfig(64, 64, 12): 0.3,
}
"""Time of a step for each tile, relative to the widest, on an H200."""


def product_config(num_groups: int, num_rows: int, num_cols: int, num_sms: int) -> ProductConfig:
    """The tile with the least time on the busiest SM, for groups of `num_rows` rows."""

    def time(config: ProductConfig) -> float:
        num_tiles = num_groups * ceil_div(num_rows, config.block_m) * ceil_div(num_cols, config.block_n)
        return ceil_div(num_tiles, num_sms) * CONFIGS[config]

    return min(CONFIGS, key=time)


def out_shape(config: ProductConfig, d_dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of results in shared memory: for 128 rows two pieces of 128 bytes a row, for 64 rows the whole tile."""
    return (2, 128, 128 // d_dtype.itemsize) if config.block_m == 128 else (config.block_m, config.block_n)
