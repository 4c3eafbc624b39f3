"""Shared by the kernels of all casts: limits of the formats, vectorized loads, float32 to packed codes, and stores.

The functions `*_macro` return TileLang macros. Like a kernel's builder they import TileLang when they are called.
"""

import struct
from functools import cache
from typing import Any

import torch

from tk_quant.device.fp4 import encode_e2m1x8

FLOAT4_DTYPE: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
LIMITS = {"e4m3": (448.0, 1e-4), "e2m1": (6.0, 6 * 2.0**-126), "e5m6": (65024.0, 1e-4)}
"""By format: (largest finite value, least amax, to which a smaller amax is raised)."""
BITS = {"e4m3": 8, "e2m1": 4, "e5m6": 12}
"""By format: bits of a code."""
INFINITY_BITS = 0x7F800000
TILE_ROWS = 128
"""Tokens of a tile in the kernels that cast by channel."""
OWN_GUARDS_AND_BARRIERS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_thread_storage_sync": True,
}
"""Pass configs of kernels that check bounds and place barriers themselves, and never reuse a shared array."""


def float_bits(value: float) -> int:
    """The bits of a float32 as an int32. For non-negative floats these compare in order, with NaN above infinity."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@cache
def encode_macro(fmt: str, num_values: int, are_bounded: bool = False) -> Any:
    """Macro `encode(scaled, words)`: float32 (num_values,) to codes packed in uint32 (num_values * bits / 32,).

    Rounds to nearest, ties to even, and saturates. num_values is a multiple of 4 for e4m3, of 8 for e2m1.
    `are_bounded`: see `encode_e2m1x8`.
    """
    import tilelang.language as T

    @T.macro
    def encode_e4m3(scaled: T.Buffer, words: T.Buffer) -> None:
        codes = T.view(words, (num_values,), "float8_e4m3fn")
        for j in T.vectorized(num_values):
            codes[j] = T.cast(scaled[j], "float8_e4m3fn")

    @T.macro
    def encode_e2m1(scaled: T.Buffer, words: T.Buffer) -> None:
        for j in T.unroll(num_values // 8):
            words[j] = encode_e2m1x8((scaled[8 * j + k] for k in range(8)), are_bounded)

    return {"e4m3": encode_e4m3, "e2m1": encode_e2m1}[fmt]


@cache
def load_macro(num_words: int, elements_per_word: int, alignment: int) -> Any:
    """Macro `load(x, words, index, row, col, valid)`: load num_words uint32 from x[row, col:] into words[index].

    `alignment`, from `check.row_alignment`, decides how wide the loads are: up to 16 bytes. `col` is a multiple of
    num_words * elements_per_word. Loads are predicated: where `valid` is false nothing is read and the words are 0.
    """
    import tilelang.language as T

    width = min(alignment // 4, num_words, 4)

    @T.macro
    def load(x: T.Buffer, words: T.Buffer, index: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        if width > 1:
            wide_load = T.ldg128 if width == 4 else T.ldg64
            for j in T.unroll(num_words // width):
                first = col + width * j * elements_per_word
                words[index, width * j : width * j + width] = wide_load(x[row, first], pred=valid)
        elif width == 1:
            for j in T.unroll(num_words):
                words[index, j] = T.ldg32(x[row, col + j * elements_per_word], pred=valid)
        else:
            elements = T.view(words, (words.shape[0], words.shape[1] * elements_per_word), x.dtype)
            for j in T.unroll(num_words):
                words[index, j] = T.uint32(0)
            if valid:
                for j in T.unroll(num_words * elements_per_word):
                    elements[index, j] = x[row, col + j]

    return load


def element(words: Any, row: Any, index: Any, is_bf16: bool) -> Any:
    """float32 expression of element `index` of words[row]; a uint32 word holds two bfloat16 or one float32."""
    import tilelang.language as T

    if not is_bf16:
        return T.reinterpret(words[row, index], "float32")
    word = words[row, index // 2]
    half = T.if_then_else(index % 2 == 0, word << T.uint32(16), word & T.uint32(0xFFFF0000))
    return T.reinterpret(half, "float32")


@cache
def store_codes_macro(num_words: int, elements_per_word: int = 4) -> Any:
    """Macro `store(out, words, row, col)`: store 1, 2 or 4 * n uint32 to out[row, col:] in the widest stores."""
    import tilelang.language as T

    @T.macro
    def store(out: T.Buffer, words: T.Buffer, row: T.int32, col: T.int32) -> None:
        if num_words == 1:
            T.stg32(out[row, col], words[0])
        elif num_words == 2:
            T.stg64(out[row, col], words[0:2])
        else:
            for j in T.unroll(num_words // 4):
                T.stg128(out[row, col + 4 * j * elements_per_word], words[4 * j : 4 * j + 4])

    return store
