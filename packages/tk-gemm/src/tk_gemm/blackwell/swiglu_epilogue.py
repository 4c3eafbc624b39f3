"""What the storing warps do with sums of the gate and of up: SwiGLU, and the cast of each row's 128 outputs to e4m3.

A thread has a row, and reads its sums twice, for amax and for the codes: with the 128 outputs kept in between, it would
run out of registers.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_gemm import scheduler, swiglu
from tk_gemm.blackwell.sums import Sums
from tk_gemm.blackwell.tiles import BLOCK, PIECE
from tk_gemm.kernels import Kind
from tk_gemm.scheduler import Tile


class Results(NamedTuple):
    """What results depend on beside the sums, and where they go."""

    kind: Kind
    layout: T.Buffer
    weights: tuple[T.Buffer, T.Buffer] | None  # indices (M) of rows' weights, and the weights, where there are any
    clamp: "T.PrimExpr | None"
    data: T.Buffer  # e4m3 (M, I)
    sf: T.Buffer  # uint8 (words, 4 · M)


@T.macro
def store(x: Results, tile: Tile, s: Sums) -> None:
    """In the storing warps: write a tile's codes and factors, but of no rows past the last."""
    gate, up = (T.alloc_fragment((BLOCK, PIECE), "float32") for _ in range(2))
    is_row = T.alloc_fragment((BLOCK,), "int32")
    weight = T.alloc_fragment((BLOCK,), "float32") if x.weights is not None else None
    amax = T.alloc_fragment((BLOCK,), "int32")
    scale = T.alloc_fragment((BLOCK,), "float32")
    rows = swiglu.Rows(tile.row[0], x.data.shape[0], is_row)
    block = T.truncdiv(tile.col[0], 2 * BLOCK)
    scheduler.find_rows(x.kind, x.layout, tile, 0, x.data.shape[0], is_row)
    if weight is not None:
        swiglu.find_weights(rows, *x.weights, weight)
    T.mbarrier_wait_parity(s.summed[0], s.parity[0])
    T.clear(amax)
    for first in T.unroll(0, BLOCK, PIECE):
        _activate(x, s, first, gate, up, weight)
        swiglu.find_amax(gate, up, amax, False)
    swiglu.write_exponents(rows, amax, scale, x.sf, block)
    for first in T.unroll(0, BLOCK, PIECE):
        _activate(x, s, first, gate, up, weight)
        swiglu.write_codes(rows, gate, scale, x.data, block * BLOCK + first)
    T.mbarrier_arrive(s.taken[0])


@T.macro
def _activate(x: Results, s: Sums, first: T.PrimExpr, gate: T.Buffer, up: T.Buffer, weight: T.Buffer) -> None:
    """gate = the outputs of the tile's columns from `first` on."""
    T.copy(s.parts[0][:, first : first + PIECE], gate)
    T.copy(s.parts[1][:, first : first + PIECE], up)
    swiglu.activate(gate, up, weight, x.clamp)
