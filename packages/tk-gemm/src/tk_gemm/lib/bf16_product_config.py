"""Tiles of the BF16 products' kernel, and how one is picked for a shape."""

from typing import Literal

from tk_core.math import ceil_div
from tk_gemm.lib.fp8_product_config import ProductConfig

STEP_K = 64
"""Channels of a step: 128 bytes of an operand's row."""

Kind = Literal["dense", "ids", "psum", "masked", "k"]
"""How the weights of a tile's rows are found, as in the FP8 products; "k": groups are ranges of K."""

CONFIGS = {
    ProductConfig(128, 256, 4): 1.0,
    ProductConfig(128, 192, 4): 0.8,
    ProductConfig(128, 128, 6): 0.6,
    ProductConfig(64, 256, 4): 0.62,
    ProductConfig(64, 128, 8): 0.44,
}
"""Time of a step for each tile, relative to the widest: estimates, from those of the FP8 products, whose steps have as
many bytes and take the tensor core as long."""


def bf16_product_config(num_groups: int, num_rows: int, num_cols: int, num_sms: int) -> ProductConfig:
    """The tile with the least time on the busiest SM, for groups of `num_rows` rows."""

    def time(config: ProductConfig) -> float:
        num_tiles = num_groups * ceil_div(num_rows, config.block_m) * ceil_div(num_cols, config.block_n)
        return ceil_div(num_tiles, num_sms) * CONFIGS[config]

    return min(CONFIGS, key=time)
