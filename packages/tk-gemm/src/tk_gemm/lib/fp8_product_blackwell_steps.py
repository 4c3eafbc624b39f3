"""Steps of the FP8 products' kernels on Blackwell; BF16 ones share finish and store. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_config import BLOCK_K
from tk_gemm.lib.fp8_product_steps import A_GROUP, B_GROUP, COL, NUM_ROWS, ROW
from tk_gemm.lib.fp8_product_steps import finish as zero_padding


@T.macro
def load_words(sf: Any, words: Any, full: Any, slot: Any, group: Any, first: Any, step: Any) -> None:
    """Begin to load the words with the factors of a tile's rows for this step and the three after it."""
    source = sf[group, step // 4, first : first + words.shape[1]]
    T.tma_copy(source, words[slot, :], barrier=full[slot], leader_scope_threads=32)


@T.macro
def arrange(words: Any, slot: Any) -> None:
    """Put 128 words into the order of tensor memory, 4 in each of 32 lanes: row r goes to [r % 32, r // 32]."""
    T.tcgen05_sf_warp_transpose(words[slot, :])


@T.macro
def repeat_word(sf: Any, words: Any, slot: Any, place: Any, n: Any, first: Any, step: Any) -> None:
    """Write the word of the 128 × 128 blocks of the tile's 128 columns from `first` on, once for each column."""
    word = T.alloc_var("int32")
    word = sf[place[B_GROUP], step // 4, T.min(place[COL] + first, n - 1) // 128]
    for x in T.unroll(4):
        words[slot, x * 32 + T.get_thread_binding() % 32] = word


@T.macro
def multiply(
    a_tile: Any,
    b_tile: Any,
    first: Any,
    sums: Any,
    factors: Any,
    slot: Any,
    step: Any,
    is_first: Any,
    done: Any,
) -> None:
    """Begin sums += a step's product with 128 columns from `first` on, or sums = it where the step is the first.

    `factors` of A and of B are words in tensor memory, of which the tensor cores take the step's byte. done[slot] is
    signalled once the product is done; `done` is None but for the last product of a step.
    """
    T.tcgen05_gemm_blockscaled(
        a_tile[slot, :, :],
        b_tile[slot, first : first + 128, :],
        sums,
        factors[0],
        factors[1],
        transpose_B=True,
        mbar=None if done is None else done[slot],
        clear_accum=is_first,
        k_start=step * BLOCK_K,
        sf_a_granularity_k=BLOCK_K,
        sf_b_granularity_k=BLOCK_K,
    )


@T.macro
def finish(acc: Any, c: Any, is_row: Any, m: Any, n: Any, place: Any, first: Any) -> None:
    """acc += c, read 16 bytes at a time, and padding becomes zero; c and is_row may be None."""
    if c is not None:
        width = 128 // c.dtype.bits
        col = place[COL] + first
        T.assume(col % width == 0)
        T.assume(c.strides[0] % width == 0)
        T.assume(c.strides[1] % width == 0)
        for i, j, x in T.Parallel(acc.shape[0], acc.shape[1] // width, width):
            if place[ROW] + i < m and col + j * width < n:
                acc[i, j * width + x] += T.cast(c[place[A_GROUP], place[ROW] + i, col + j * width + x], "float32")
    zero_padding(acc, None, is_row, m, n, place, first)


@T.macro
def store(kind: Any, acc: Any, m: Any, n: Any, place: Any, first: Any, d: Any) -> None:
    """Write a tile's columns from `first` on, 16 bytes at a time, but no rows and columns past the last."""
    width = 128 // d.dtype.bits
    col = place[COL] + first
    T.assume(col % width == 0)
    T.assume(d.strides[0] % width == 0)
    T.assume(d.strides[1] % width == 0)
    for i, j, x in T.Parallel(acc.shape[0], acc.shape[1] // width, width):
        is_row = i < place[NUM_ROWS] if kind == "masked" else place[ROW] + i < m
        if is_row and col + j * width < n:
            d[place[A_GROUP], place[ROW] + i, col + j * width + x] = acc[i, j * width + x]
