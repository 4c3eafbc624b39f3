"""Casts of a tile of float32 to e2m1 codes, which are stored.

Kernels import this module in their builder, as it imports TileLang.
"""

import tilelang.language as T

from tk_core.device.e2m1 import e2m1x8_by_power, encode_e2m1x8
from tk_quant.cast.config import TileConfig
from tk_quant.cast.tile import layout_of_rows, scale_values


@T.macro
def store_e2m1(
    values: T.Buffer,
    factors: T.Buffer,
    data: T.Buffer,
    row: T.int32,
    col: T.int32,
    num_rows: T.int32,
    are_bounded: bool,
    config: TileConfig,
) -> None:
    """Multiply values by the factors of their blocks, and store the products' codes at (row, col) of data.

    Rows from num_rows on are skipped. `are_bounded`: the factors were made from the values' amax, so no finite value
    saturates.
    """
    down, tokens, _, size = config.tile
    scaled = scale_values(values, factors, config)
    words = T.alloc_fragment((down, tokens, config.channels // 8), "uint32")
    T.annotate_layout({words: layout_of_rows(config, 8)})
    for i, t, w in T.Parallel(*words.shape):
        eight = T.alloc_local((8,), "float32")
        for k in T.unroll(8):
            eight[k] = scaled[i, t, (8 * w + k) // size, (8 * w + k) % size]
        # If a word has codes of several blocks, NaN or infinity in one would spoil the others.
        words[i, t, w] = encode_e2m1x8((eight[k] for k in range(8)), are_bounded and size >= 8)
    _store_words(words, data, row, col, num_rows, config)


@T.macro
def store_e2m1_by_power(
    values: T.Buffer,
    factors: T.Buffer,
    data: T.Buffer,
    row: T.int32,
    col: T.int32,
    num_rows: T.int32,
    config: TileConfig,
) -> None:
    """`store_e2m1` of bfloat16 values times powers of two, for GPUs without an instruction that casts to e2m1."""
    down, tokens, _, size = config.tile
    words = T.alloc_fragment((down, tokens, config.channels // 8), "uint32")
    T.annotate_layout({words: layout_of_rows(config, 8)})
    for i, t, w in T.Parallel(*words.shape):
        eight = T.alloc_local((8,), "bfloat16")
        for k in T.unroll(8):
            eight[k] = values[i, t, (8 * w + k) // size, (8 * w + k) % size]
        pairs, power = T.view(eight, (4,), "uint32"), T.reinterpret(factors[i, 8 * w // size], "uint32")
        four = tuple(pairs[k] for k in range(4))
        words[i, t, w] = e2m1x8_by_power(four, power | (power >> T.uint32(16)))
    _store_words(words, data, row, col, num_rows, config)


@T.macro
def round_to_e2m1(value: T.float32) -> T.float32:
    """The e2m1 value nearest to a float32, ties to the even code, saturating, the sign of zero kept; NaN becomes 6."""
    magnitude, step = T.alloc_var("float32"), T.alloc_var("float32")
    magnitude = T.min(T.abs(value), T.float32(6))
    # Values are .5, 1 or 2 apart, as are float32 around these powers of two.
    step = T.if_then_else(magnitude < 4, T.float32(2.0**23), T.float32(2.0**24))
    step = T.if_then_else(magnitude < 2, T.float32(2.0**22), step)
    rounded = T.reinterpret(T.ieee_sub(T.ieee_add(magnitude, step), step), "uint32")
    return T.reinterpret(rounded | (T.reinterpret(value, "uint32") & T.uint32(0x80000000)), "float32")


@T.macro
def _store_words(
    words: T.Buffer, data: T.Buffer, row: T.int32, col: T.int32, num_rows: T.int32, config: TileConfig
) -> None:
    _, tokens, width = words.shape
    vector, num_words = config.vec // 8, data.shape[1] // 4
    out = T.view(data, (data.shape[0], num_words), "uint32")
    for i, t, v in T.Parallel(words.shape[0], tokens, width // vector):
        token, word = row + i * tokens + t, col // 8 + v * vector
        # Without this copy nvcc would split the vector store, as the words were computed one by one.
        copied = T.alloc_local((vector,), "uint32")
        for k in T.unroll(vector):
            copied[k] = words[i, t, v * vector + k]
        if token < num_rows and word < num_words:
            if vector == 1:
                T.stg32(out[token, word], copied[0])
            else:
                T.stg64(out[token, word], copied[0:2])
