"""uint32 words of packed elements in a thread's registers: load them, take elements out of them, store them.

Kernels import this module in their builder, as it imports TileLang.
"""

from typing import Any

import tilelang.language as T

_WORD = 4
"""Bytes of a word."""


@T.macro
def load_words(
    x: T.Buffer, words: T.Buffer, index: int, row: T.int32, col: T.int32, valid: T.bool, alignment: int
) -> None:
    """Load a row of words (rows, words), words[index], from x[row, col:]; zeros, and no reads, where not `valid`.

    `alignment`, from `check.row_alignment`, decides how wide the loads are: up to 16 bytes. `col` is a multiple of the
    elements of a row of words.
    """
    num_words, per_word = int(words.shape[1]), 32 // T.dtype(x.dtype).bits
    width = min(alignment // 4, num_words, 4)
    if width > 1:
        wide_load = T.ldg128 if width == 4 else T.ldg64
        for j in T.unroll(num_words // width):
            first = col + width * j * per_word
            words[index, width * j : width * j + width] = wide_load(x[row, first], pred=valid)
    elif width == 1:
        for j in T.unroll(num_words):
            words[index, j] = T.ldg32(x[row, col + j * per_word], pred=valid)
    else:
        elements = T.view(words, (words.shape[0], num_words * per_word), x.dtype)
        for j in T.unroll(num_words):
            words[index, j] = T.uint32(0)
        if valid:
            for j in T.unroll(num_words * per_word):
                elements[index, j] = x[row, col + j]


def element(words: Any, row: Any, index: Any, is_bf16: bool) -> Any:
    """float32 expression of element `index` of words[row]; a uint32 word holds two bfloat16 or one float32."""
    if not is_bf16:
        return T.reinterpret(words[row, index], "float32")
    word = words[row, index // 2]
    half = T.if_then_else(index % 2 == 0, word << T.uint32(16), word & T.uint32(0xFFFF0000))
    return T.reinterpret(half, "float32")


@T.macro
def store_words(out: T.Buffer, words: T.Buffer, row: T.int32, col: T.int32) -> None:
    """Store 1, 2 or 4 * n words to out[row, col:], whose elements are bytes, in the widest stores."""
    num_words = int(words.shape[0])
    if num_words == 1:
        T.stg32(out[row, col], words[0])
    elif num_words == 2:
        T.stg64(out[row, col], words[0:2])
    else:
        for j in T.unroll(num_words // 4):
            T.stg128(out[row, col + 4 * j * _WORD], words[4 * j : 4 * j + 4])
