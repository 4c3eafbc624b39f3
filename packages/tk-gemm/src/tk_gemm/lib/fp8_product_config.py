"""Tiles of the FP8 products' kernels, and how one is picked for a shape."""

from dataclasses import dataclass
from typing import Literal

import torch

from tk_core.math import ceil_div

BLOCK_K = 128
STRIP = 8
"""Tiles of so many times 128 rows are taken one column after the other."""

Kind = Literal["dense", "ids", "psum", "masked"]
"""How a tile's rows find their weights: all the same, by an id a row, by ends of groups, or a buffer a group."""


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
"""Tiles with the time of a step in each, relative to the widest, on an H200 (docs/tuning/gemm.md)."""


def product_config(num_groups: int, num_rows: int, num_cols: int, num_sms: int) -> ProductConfig:
    """The tile with which the SM that has most of them is done first, for groups of `num_rows` rows."""

    def time(config: ProductConfig) -> float:
        num_tiles = num_groups * ceil_div(num_rows, config.block_m) * ceil_div(num_cols, config.block_n)
        return ceil_div(num_tiles, num_sms) * CONFIGS[config]

    return min(CONFIGS, key=time)


def out_shape(config: ProductConfig, d_dtype: torch.dtype) -> tuple[int, ...]:
    """Shared memory for results: of 128 rows, two pieces of 128 bytes a row; of 64, the tile."""
    return (2, 128, 128 // d_dtype.itemsize) if config.block_m == 128 else (config.block_m, config.block_n)
