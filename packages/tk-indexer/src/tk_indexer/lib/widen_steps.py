"""Steps that widen rows of FP4 to e4m3 with one factor a row; the values stay the same.

    row      E = the largest byte of its sf, factor = 2^(max(E - 6, 1) - 127)
    group    each code times 2^shift, shift = its byte - max(E - 6, 1) ≤ 6: the largest, 6 · 2⁶, is 384

A group's eight magnitudes, in e4m3, fill two words, a table in which a permutation of bytes looks up four codes.
Kernels import this module in their builder, as it imports TileLang.
"""

import tilelang.language as T

from tk_core.device.e2m1 import e4m3_of_e2m1_magnitudes, e4m3_of_e2m1x8
from tk_indexer.lib.rows import FP4_GROUP

_LEAST_SHIFT, _LARGEST_SHIFT = -20, 6
"""At the first of these, and below, all magnitudes are zeros in e4m3."""


@T.macro
def widen(codes: T.Buffer, sf: T.Buffer, group: T.PrimExpr, dim: int, words: T.Buffer) -> None:
    """Widen codes of one group, uint32 (n), to `words`, uint32 (2 · n). sf, uint32 (1), has a row's bytes."""
    table = T.alloc_local((2,), "uint32")
    e4m3_of_e2m1_magnitudes(_shift(sf, group, dim), table[0], table[1])
    _look_up(codes, table, words)


@T.macro
def widen_by_tables(
    codes: T.Buffer, sf: T.Buffer, group: T.PrimExpr, dim: int, tables: T.Buffer, words: T.Buffer
) -> None:
    """The same by the tables of `write_tables`: to read one takes a fifth of the instructions that make it."""
    table, index = T.alloc_local((2,), "uint32"), T.alloc_var("int32")
    index = T.max(_shift(sf, group, dim), _LEAST_SHIFT) - _LEAST_SHIFT
    for half in T.vectorized(2):
        table[half] = tables[index, half]
    _look_up(codes, table, words)


def alloc_tables() -> T.Buffer:
    """Room in shared memory for the tables of all shifts."""
    return T.alloc_shared((_LARGEST_SHIFT - _LEAST_SHIFT + 1, 2), "uint32", scope="shared")


@T.macro
def write_tables(tables: T.Buffer) -> None:
    """In a thread block: write the tables of all shifts, one a thread."""
    low, high = T.alloc_var("uint32"), T.alloc_var("uint32")
    thread = T.get_thread_binding()
    if thread < tables.shape[0]:
        e4m3_of_e2m1_magnitudes(thread + _LEAST_SHIFT, low, high)
        tables[thread, 0] = low
        tables[thread, 1] = high


@T.macro
def factor_of_row(sf: T.Buffer, dim: int) -> T.PrimExpr:
    """The bits, uint32, of the factor that a row of `dim` channels has when it is widened."""
    largest = T.alloc_var("int32")
    largest = _largest(sf, dim)
    return T.reinterpret(T.if_then_else(largest == 255, 0x7FC00000, T.max(largest - 6, 1) << 23), "uint32")


@T.macro
def _look_up(codes: T.Buffer, table: T.Buffer, words: T.Buffer) -> None:
    for j in T.unroll(codes.shape[0]):
        e4m3_of_e2m1x8(codes[j], table[0], table[1], T.address_of(words[2 * j]))


@T.macro
def _shift(sf: T.Buffer, group: T.PrimExpr, dim: int) -> T.PrimExpr:
    return _byte(sf, group) - T.max(_largest(sf, dim) - 6, 1)


@T.macro
def _largest(sf: T.Buffer, dim: int) -> T.PrimExpr:
    largest = T.alloc_var("int32", init=0)
    for group in T.unroll(dim // FP4_GROUP):
        largest = T.max(largest, _byte(sf, group))
    return largest


def _byte(sf: T.Buffer, group: T.PrimExpr) -> T.PrimExpr:
    return T.cast(sf[0] >> T.cast(8 * group, "uint32") & T.uint32(0xFF), "int32")
