"""Steps that widen rows of FP4 to e4m3 with one factor a row, 16 channels a lane; the values stay the same.

    row      E = the largest byte of its sf, sf = 2^(max(E - 6, 1) - 127)
    group    each code times 2^shift, shift = its byte - max(E - 6, 1) ≤ 6: the largest, 6 · 2⁶, is 384

A group's eight magnitudes, in e4m3, fill two words, a table in which a permutation of bytes looks up four codes.
Kernels import this module in their builder, as it imports TileLang.
"""

import tilelang.language as T

from tk_core.device.e2m1 import e4m3_of_e2m1_magnitudes, e4m3_of_e2m1x8
from tk_indexer.lib.rows import FP4_GROUP

CHANNELS = 16
"""Channels of a lane: eight bytes of codes, 16 of e4m3."""


@T.macro
def widen(codes: T.Buffer, sf: T.Buffer, lane: T.PrimExpr, dim: int, words: T.Buffer) -> T.PrimExpr:
    """Widen a lane's codes, uint32 (2), to `words`, uint32 (4); return the bits of the row's factor, uint32.

    sf, uint32 (1), has the bytes of the row, `lane` is the lane's index in the row of `dim` channels.
    """
    largest, of_row = T.alloc_var("int32", init=0), T.alloc_var("int32")
    low, high = T.alloc_var("uint32"), T.alloc_var("uint32")
    for group in T.unroll(dim // FP4_GROUP):
        largest = T.max(largest, _byte(sf, group))
    of_row = T.max(largest - 6, 1)
    e4m3_of_e2m1_magnitudes(_byte(sf, lane * CHANNELS // FP4_GROUP) - of_row, low, high)
    for j in T.unroll(2):
        e4m3_of_e2m1x8(codes[j], low, high, T.address_of(words[2 * j]))
    return T.reinterpret(T.if_then_else(largest == 255, 0x7FC00000, of_row << 23), "uint32")


def _byte(sf: T.Buffer, group: T.PrimExpr) -> T.PrimExpr:
    return T.cast(sf[0] >> T.cast(8 * group, "uint32") & T.uint32(0xFF), "int32")
