"""The cast of a tile of float32 to e4m3 codes, which are stored.

Kernels import this module in their builder, as it imports TileLang.
"""

import tilelang.language as T

from tk_quant.cast.config import TileConfig
from tk_quant.cast.tile import layout_of_tile


@T.macro
def store_e4m3(
    values: T.Buffer,
    factors: T.Buffer,
    data: T.Buffer,
    row: T.int32,
    col: T.int32,
    num_rows: T.int32,
    config: TileConfig,
) -> None:
    """Multiply values by the factors of their blocks, and store the products' codes at (row, col) of data.

    Rows from num_rows on are skipped.
    """
    _, tokens, _, size = config.tile
    codes = T.alloc_fragment(config.tile, "float8_e4m3fn")
    T.annotate_layout({codes: layout_of_tile(config)})
    for i, t, g, j in T.Parallel(*config.tile):
        codes[i, t, g, j] = T.cast(T.cast(values[i, t, g, j], "float32") * factors[i, g], "float8_e4m3fn")
    for i, t, g, j in T.Parallel(*config.tile):
        token, channel = row + i * tokens + t, col + g * size + j
        # Compares vectors, so that TileLang sees one guard for all elements of a vector.
        if token < num_rows and channel // config.vec < data.shape[1] // config.vec:
            data[token, channel] = codes[i, t, g, j]
