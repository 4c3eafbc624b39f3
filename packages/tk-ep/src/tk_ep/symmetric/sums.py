"""How a warp sums the rows of a token that are on its rank, and sends the sum, piece by piece.

    rows in memory ── bulk loads ──▶ stages ── the lanes add ──▶ places ── bulk stores ──▶ the token's rank

A step is a piece of at most four rows. While the lanes add one step's, the next one's are on their way, and so are the
pieces that have been summed.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_core.math import ceil_div
from tk_ep.symmetric import rows
from tk_ep.symmetric.flags import Ranks
from tk_ep.symmetric.memory import UNIT, SumRow
from tk_ep.symmetric.rows import VECTOR, Facts, Stage

_VECTORS = 4
"""Vectors of a piece that a lane has."""
_PIECE = 32 * _VECTORS
"""Vectors of a piece."""
_ROWS = 4
"""Rows of a step."""
_STAGES = 2
_PLACES = 2


class SumStage(NamedTuple):
    """A warp's places in shared memory: for pieces that are sent, and for steps that are loaded."""

    sent: Stage  # with a barrier for each stage of each warp
    loaded: T.Buffer  # bfloat16 (warps · stages, rows of a step, vectors of a piece, 8)
    listed: T.Buffer  # int32 (warps, K), the vectors at which the token's rows begin
    steps: T.Buffer  # int32 (1), those that the warp has taken
    pieces: T.Buffer  # int32 (1), those that the warp has sent


class Sum(NamedTuple):
    """What is summed, and where it goes."""

    source: T.Buffer  # bfloat16 (vectors, 8)
    row: SumRow
    first: T.PrimExpr
    """int32: the vector at which the row of the lane's slot begins, negative for none"""
    facts: Facts
    to: T.PrimExpr
    unit: T.PrimExpr
    """Where the row begins in the buffer of rank `to`"""


def place_units(row: SumRow) -> int:
    """Units of a place for a piece, and for the facts behind the last one."""
    return min(row.values, _PIECE) + row.facts


def warp_units(row: SumRow) -> int:
    """Units of shared memory that a warp takes."""
    return _PLACES * place_units(row) + _STAGES * _ROWS * min(row.values, _PIECE)


def stage(warps: int, row: SumRow, num_topk: int) -> SumStage:
    """The places of a thread block's warps."""
    thread = T.get_thread_binding()
    words = T.alloc_shared((warps, _PLACES * place_units(row) * 4), "int32")
    loaded = T.alloc_shared((warps * _STAGES, _ROWS, min(row.values, _PIECE), VECTOR), "bfloat16")
    barriers = T.alloc_barrier([1] * (warps * _STAGES))
    sent = Stage(words, barriers, T.alloc_var("int32", init=0), thread // 32, thread % 32)
    listed = T.alloc_shared((warps, num_topk), "int32")
    return SumStage(sent, loaded, listed, T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32"))


@T.macro
def begin(s: SumStage) -> None:
    """Before the first sum."""
    s.steps[0] = 0
    s.pieces[0] = 0


@T.macro
def _load(s: SumStage, x: Sum, step: T.PrimExpr, taken: T.PrimExpr, count: T.PrimExpr, batches: T.PrimExpr) -> None:
    """Begin to load a token's step, the warp's step `taken`; one lane calls it."""
    piece, first_row = T.truncdiv(step, batches), T.truncmod(step, batches) * _ROWS
    size = T.min(x.row.values - piece * _PIECE, _PIECE)
    place = s.sent.warp * _STAGES + taken % _STAGES
    T.mbarrier_arrive_expect_tx(s.sent.loaded[place], T.min(count - first_row, _ROWS) * size * UNIT)
    for k in T.unroll(_ROWS):
        if first_row + k < count:
            T.tma_load(
                T.access_ptr(s.loaded[place, k, 0, 0], "w"),
                T.access_ptr(x.source[T.cast(s.listed[s.sent.warp, first_row + k] + piece * _PIECE, "int64"), 0], "r"),
                s.sent.loaded[place],
                size * UNIT,
                0,
            )


@T.macro
def _add(s: SumStage, count: T.PrimExpr, size: T.PrimExpr, acc: T.Buffer) -> None:
    """Wait for the warp's next step, and add its `count` rows to acc."""
    place = s.sent.warp * _STAGES + s.steps[0] % _STAGES
    T.mbarrier_wait_parity(s.sent.loaded[place], (s.steps[0] // _STAGES) % 2)
    for k in T.unroll(_ROWS):
        if k < count:
            for j in T.unroll(_VECTORS):
                vector = T.alloc_local((VECTOR,), "bfloat16")
                if s.sent.lane + 32 * j < size:
                    for v in T.vectorized(VECTOR):
                        vector[v] = s.loaded[place, k, s.sent.lane + 32 * j, v]
                    for v in T.unroll(VECTOR):
                        acc[j, v] = acc[j, v] + T.cast(vector[v], "float32")
    s.steps[0] = s.steps[0] + 1
    # The next load of this stage writes what has been read here.
    T.fence_proxy_async()
    T.sync_warp()


@T.macro
def send(s: SumStage, x: Sum, r: Ranks) -> None:
    """Send the sum of the token's rows, slots ascending, and its facts; all lanes of a warp call it."""
    lane, last = s.sent.lane, ceil_div(x.row.values, _PIECE) - 1
    num_pieces, has_row = last + 1, T.ballot(x.first >= 0)
    places = T.view(s.sent.words, (int(s.sent.words.shape[0]), int(s.sent.words.shape[1]) * 2), "bfloat16")
    acc, taken = T.alloc_local((_VECTORS, VECTOR), "float32"), T.alloc_var("int32", init=0)
    count, batches, place, size, begun = (T.alloc_var("int32", init=0) for _ in range(5))
    count = T.cast(T.popcount(has_row), "int32")
    batches = T.ceildiv(count, _ROWS)
    if x.first >= 0:
        before = T.popcount(has_row & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
        s.listed[s.sent.warp, T.cast(before, "int32")] = x.first
    T.sync_warp()
    begun = s.steps[0]
    if lane == 0:
        for step in T.unroll(_STAGES):
            if step < num_pieces * batches:
                _load(s, x, step, begun + step, count, batches)
    for piece in T.serial(num_pieces):
        size = T.min(x.row.values - piece * _PIECE, _PIECE)
        for j, v in T.grid(_VECTORS, VECTOR):
            acc[j, v] = T.float32(0)
        for batch in T.serial(batches):
            _add(s, count - batch * _ROWS, size, acc)
            taken = s.steps[0] - begun + _STAGES - 1
            if lane == 0 and taken < num_pieces * batches:
                _load(s, x, taken, begun + taken, count, batches)
        place = s.pieces[0] % _PLACES * place_units(x.row)
        s.pieces[0] = s.pieces[0] + 1
        T.tma_store_wait(_PLACES - 1)
        T.sync_warp()
        for j in T.unroll(_VECTORS):
            if lane + 32 * j < size:
                for v in T.vectorized(VECTOR):
                    places[s.sent.warp, (place + lane + 32 * j) * VECTOR + v] = T.cast(acc[j, v], "bfloat16")
        if piece == last:
            rows.write_facts(s.sent, place + x.row.values - last * _PIECE, x.facts)
        T.fence_proxy_async()
        T.sync_warp()
        if lane == 0:
            rows.send(
                s.sent, place, size + T.if_then_else(piece == last, x.row.facts, 0), r, x.to, x.unit + piece * _PIECE
            )
        T.tma_store_arrive()
