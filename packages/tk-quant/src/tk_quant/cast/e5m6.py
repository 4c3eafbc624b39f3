"""e5m6 codes: cast a tile to them and store it; load them as uint32 words, and decode them to float32.

Eight codes of 12 bits fill three words. The first four are the upper 48 bits of words 0 and 1, the other four the
lower 48 bits of words 1 and 2. So a vector of eight codes takes three words. One of four takes two, and shares word 1.
Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

from tk_quant.cast.config import TileConfig
from tk_quant.cast.tile import scale_values
from tk_quant.device.e5m6 import encode_e5m6x8


@T.macro
def store_e5m6(
    values: T.Buffer, factors: T.Buffer, data: T.Buffer, row: T.int32, col: T.int32, config: TileConfig
) -> None:
    """Multiply values by the factors of their blocks, and store the products' codes at (row, col) of data.

    Eight codes are twelve bytes; they go through shared memory, so that a warp's stores are coalesced.
    """
    down, tokens, _, size = config.tile
    width, num_words = config.channels // 8, data.shape[1] // 4
    out = T.view(data, (data.shape[0], num_words), "uint32")
    scaled = scale_values(values, factors, config)
    words = T.alloc_shared((down, tokens, 3 * width), "uint32")
    for i, t, w in T.Parallel(down, tokens, width):
        eight, three = T.alloc_local((8,), "float32"), T.alloc_local((3,), "uint32")
        for k in T.unroll(8):
            eight[k] = scaled[i, t, (8 * w + k) // size, (8 * w + k) % size]
        encode_e5m6x8(T.address_of(eight[0]), T.address_of(three[0]))
        for k in T.unroll(3):
            words[i, t, 3 * w + k] = three[k]
    for i, t, w in T.Parallel(*words.shape):
        token, word = row + i * tokens + t, col // 8 * 3 + w
        if token < data.shape[0] and word // 4 < num_words // 4:
            out[token, word] = words[i, t, w]


def words_of_vector(vector: int) -> int:
    """How many words hold a vector of 4 or 8 codes."""
    return {4: 2, 8: 3}[vector]


def _first_word(vector_index: Any, num_words: int) -> Any:
    """Index in a row of the first word of a vector."""
    return vector_index * 3 if num_words == 3 else vector_index // 2 * 3 + vector_index % 2


@T.macro
def load_e5m6(x: T.Buffer, words: T.Buffer, row: T.int32, first_vector: T.int32, alignment: int) -> None:
    """Load words, uint32 (rows, vectors, words of a vector), from x, uint8 with rows aligned to `alignment` bytes."""
    for i, j, k in T.Parallel(*words.shape):
        index = _first_word(first_vector + j, words.shape[2]) + k
        if alignment >= 4:
            shape, strides = (x.shape[0], x.shape[1] // 4), (x.strides[0] // 4, 1)
            words[i, j, k] = T.view(x, shape, "uint32", strides=strides)[row + i, index]
        else:
            of_bytes = [T.cast(x[row + i, index * 4 + byte], "uint32") << T.uint32(8 * byte) for byte in range(4)]
            words[i, j, k] = of_bytes[0] | of_bytes[1] | of_bytes[2] | of_bytes[3]


@T.macro
def decode_e5m6(words: T.Buffer, values: T.Buffer, first_vector: T.int32) -> None:
    """Decode words to values, float32 (rows, channels); a code is the upper 12 bits of a float16."""
    num_words, vector = words.shape[2], values.shape[1] // words.shape[1]
    for i, j in T.Parallel(words.shape[0], words.shape[1]):
        of_vector = T.alloc_local((num_words,), "uint64")
        for k in T.unroll(num_words):
            of_vector[k] = T.cast(words[i, j, k], "uint64")
        for k in T.unroll(vector):
            skipped = k // 4 * 16 if vector == 8 else (first_vector + j) % 2 * 16
            four = (of_vector[k // 4] << T.uint64(32) | of_vector[k // 4 + 1]) << T.cast(skipped + k % 4 * 12, "uint64")
            bits = T.cast(four >> T.uint64(48), "uint16") & T.uint16(0xFFF0)
            values[i, j * vector + k] = T.cast(T.reinterpret(bits, "float16"), "float32")
