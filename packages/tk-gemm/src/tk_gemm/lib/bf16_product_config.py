"""Sizes of the BF16 products' kernel, and how one is picked for a shape."""

from typing import Literal

import torch

from tk_core.math import ceil_div
from tk_gemm.lib.fp8_product_config import ProductConfig

STEP_K = 64
"""Channels of a step: 128 bytes of an operand's row."""

Kind = Literal["dense", "ids", "psum", "masked", "k"]
"""How a tile's rows find their weights, as in the FP8 products; "k": groups are ranges of K."""

_CONFIGS = {
    ProductConfig(256, 4): 1.0,
    ProductConfig(192, 4): 1.1,
    ProductConfig(128, 6): 1.3,
    ProductConfig(64, 8): 2.0,
}
"""Tiles with the time that a column takes in each: estimates, from the bytes of both operands that it needs."""


def bf16_product_config(num_row_tiles: int, num_cols: int, num_sms: int) -> ProductConfig:
    """The tile with which the SM that has most of them is done first."""

    def time(config: ProductConfig) -> float:
        num_turns = ceil_div(num_row_tiles * ceil_div(num_cols, config.block_n), num_sms)
        return num_turns * config.block_n * _CONFIGS[config]

    return min(_CONFIGS, key=time)


def part_cols(d_dtype: torch.dtype) -> int:
    """Columns of D that a tile stores at a time: 128 bytes of a row, the width of TMA's swizzle."""
    return 128 // d_dtype.itemsize
