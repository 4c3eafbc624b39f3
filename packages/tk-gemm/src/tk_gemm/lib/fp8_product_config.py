"""Sizes of the FP8 products' kernel, and how one is picked for a shape."""

from dataclasses import dataclass
from typing import Literal

import torch

from tk_core.math import ceil_div

BLOCK_M = 128
BLOCK_K = 128
STRIP = 8
"""Tiles of so many rows of tiles are taken one column after the other."""

Kind = Literal["dense", "ids", "psum", "masked"]
"""How a tile's rows find their weights: all the same, by an id a row, by ends of groups, or a buffer a group."""


@dataclass(frozen=True)
class ProductConfig:
    """Columns of a tile and stages of the ring."""

    block_n: int
    num_stages: int


_CONFIGS = {
    ProductConfig(256, 4): 1.0,
    ProductConfig(128, 5): 1.15,
    ProductConfig(64, 7): 1.6,
    ProductConfig(32, 8): 2.5,
}
"""Tiles with the time that a column takes in each, on an H200 (docs/tuning/gemm.md)."""
_FLOAT32 = ProductConfig(128, 4)
"""A tile of results is twice as large."""


def product_config(num_row_tiles: int, num_cols: int, d_dtype: torch.dtype, num_sms: int) -> ProductConfig:
    """The tile with which the SM that has most of them is done first."""
    if d_dtype == torch.float32:
        return _FLOAT32

    def time(config: ProductConfig) -> float:
        num_turns = ceil_div(num_row_tiles * ceil_div(num_cols, config.block_n), num_sms)
        return num_turns * config.block_n * _CONFIGS[config]

    return min(_CONFIGS, key=time)
