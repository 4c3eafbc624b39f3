"""How a warp moves rows, from and to global memory, through its place in shared memory."""

from typing import NamedTuple

import tilelang.language as T

from tk_core.device.bits import count_leading_zeros
from tk_core.math import ceil_div
from tk_ep.device.system import bulk_store
from tk_ep.symmetric.flags import Ranks
from tk_ep.symmetric.memory import UNIT, SumRow

VECTOR = 8
"""bfloat16 values of a unit."""
_ROWS, _VECTORS = 4, 4
"""Rows, and vectors of each, that a lane loads before it adds the first."""
_PIECE = 32 * _VECTORS
"""Vectors of a sum that a warp sends at once."""
_PIECES = 4
"""Pieces for which a warp has a place: while some are sent, the next is summed."""


class Stage(NamedTuple):
    """A warp's place in shared memory for a row."""

    words: T.Buffer  # int32 (warps, 4 · units of a row)
    loaded: T.Buffer  # a barrier for each warp
    parity: T.Buffer  # int32 (1), of the next load
    warp: T.PrimExpr
    lane: T.PrimExpr


def stage(warps: int, num_units: int) -> Stage:
    """The places of a thread block's warps, for rows of so many units."""
    thread = T.get_thread_binding()
    words = T.alloc_shared((warps, num_units * 4), "int32")
    return Stage(words, T.alloc_barrier([1] * warps), T.alloc_var("int32", init=0), thread // 32, thread % 32)


@T.macro
def await_free(s: Stage) -> None:
    """Wait until the warp's stores have read the place."""
    T.tma_store_wait(0)
    T.sync_warp()


@T.macro
def clear(s: Stage) -> None:
    """Fill the place with zeros."""
    await_free(s)
    words = int(s.words.shape[1])
    for j in T.serial((words + 31) // 32):
        if j * 32 + s.lane < words:
            s.words[s.warp, j * 32 + s.lane] = 0
    T.fence_proxy_async()
    T.sync_warp()


@T.macro
def load(s: Stage, source: T.Buffer, index: T.PrimExpr, num_units: int) -> None:
    """Begin to load a row, from source[index, 0] on, to the start of the place; one lane calls it."""
    T.mbarrier_arrive_expect_tx(s.loaded[s.warp], num_units * UNIT)
    T.tma_load(
        T.access_ptr(s.words[s.warp, 0], "w"),
        T.access_ptr(source[T.cast(index, "int64"), 0], "r"),
        s.loaded[s.warp],
        num_units * UNIT,
        0,
    )


@T.macro
def await_loaded(s: Stage) -> None:
    """Wait for the row; all lanes call it."""
    T.mbarrier_wait_parity(s.loaded[s.warp], s.parity[0])
    s.parity[0] = s.parity[0] ^ 1


@T.macro
def store(s: Stage, first: int, num_units: int, buffer: T.Buffer, unit: T.PrimExpr) -> None:
    """Begin to store units of the place, from `first` on, to buffer[unit, 0] on."""
    bulk_store(
        T.access_ptr(buffer[T.cast(unit, "int64"), 0], "w"),
        T.access_ptr(s.words[s.warp, first * 4], "r"),
        num_units * UNIT,
    )


@T.macro
def send(s: Stage, first: int, num_units: int, r: Ranks, to: T.PrimExpr, unit: T.PrimExpr) -> None:
    """`store` to the buffer of rank `to`."""
    for rank in r.all_ranks:
        if to == rank:
            store(s, first, num_units, r.peers[rank], unit)


class Facts(NamedTuple):
    """What a combined row has beside its values: see memory.SumRow."""

    weight: T.PrimExpr  # int32, of the lane's slot
    has_row: T.PrimExpr  # int32
    num_topk: int


@T.macro
def write_facts(s: Stage, unit: T.PrimExpr, facts: Facts) -> None:
    """Write a combined row's facts to the place, from a unit on."""
    if s.lane < facts.num_topk:
        s.words[s.warp, unit * 4 + s.lane] = facts.weight
    if s.lane == 0:
        s.words[s.warp, unit * 4 + facts.num_topk] = facts.has_row


def piece_stage_units(row: SumRow) -> int:
    """Units of a warp's place for `send_sums`."""
    return _PIECES * (min(row.values, _PIECE) + row.facts)


def sums() -> T.Buffer:
    """A lane's sums of several vectors, float32 (vectors, 8)."""
    return T.alloc_local((_VECTORS, VECTOR), "float32")


@T.macro
def find_firsts(first: T.PrimExpr, firsts: T.Buffer) -> None:
    """firsts = the lanes' values of `first` that are not negative, in the order of lanes, then -1."""
    todo, lanes = T.alloc_var("uint32"), T.alloc_var("uint32")
    todo = T.ballot(first >= 0)
    for k in T.unroll(firsts.shape[0]):
        firsts[k] = -1
        if todo != T.uint32(0):
            lanes = todo ^ (todo - T.uint32(1))  # Up to the next one that has a value.
            firsts[k] = T.shfl_sync(first, 31 - count_leading_zeros(T.cast(lanes, "int32")))
            todo = todo & (todo - T.uint32(1))


@T.macro
def add_vectors(source: T.Buffer, firsts: T.Buffer, vector: T.PrimExpr, end: T.PrimExpr, acc: T.Buffer) -> None:
    """acc[j] += the vectors firsts[0] + i, firsts[1] + i, … of bfloat16 (vectors, 8), where i = vector + 32 · j < end.

    Negative firsts, which are the last, are none.
    """
    count = int(firsts.shape[0])
    rows = T.alloc_local((min(count, _ROWS), _VECTORS, VECTOR), "bfloat16")
    for batch in tuple(range(0, count, _ROWS)):
        if firsts[batch] >= 0:
            for k in T.unroll(min(_ROWS, count - batch)):
                for j in T.unroll(_VECTORS):
                    if firsts[batch + k] >= 0 and vector + 32 * j < end:
                        for v in T.vectorized(VECTOR):
                            rows[k, j, v] = source[T.cast(firsts[batch + k] + vector + 32 * j, "int64"), v]
            for k in T.unroll(min(_ROWS, count - batch)):
                for j in T.unroll(_VECTORS):
                    if firsts[batch + k] >= 0 and vector + 32 * j < end:
                        for v in T.unroll(VECTOR):
                            acc[j, v] = acc[j, v] + T.cast(rows[k, j, v], "float32")


@T.macro
def send_sums(
    s: Stage,
    source: T.Buffer,
    row: SumRow,
    firsts: T.Buffer,
    facts: Facts,
    sent: T.Buffer,
    r: Ranks,
    to: T.PrimExpr,
    unit: T.PrimExpr,
) -> None:
    """Send the sum of the rows that begin at `firsts`, and facts, to `unit` and on of rank `to`, piece by piece.

    sent: int32 (1,), the pieces that the warp has sent, modulo the number of places; counted on.
    """
    places = T.view(s.words, (int(s.words.shape[0]), int(s.words.shape[1]) * 2), "bfloat16")
    acc, last = sums(), ceil_div(row.values, _PIECE) - 1
    for piece in T.serial(last + 1):
        for j, v in T.grid(_VECTORS, VECTOR):
            acc[j, v] = T.float32(0)
        add_vectors(source, firsts, piece * _PIECE + s.lane, row.values, acc)
        first = sent[0] * (min(row.values, _PIECE) + row.facts)
        T.tma_store_wait(_PIECES - 1)
        T.sync_warp()
        for j in T.unroll(_VECTORS):
            if piece * _PIECE + s.lane + 32 * j < row.values:
                for v in T.vectorized(VECTOR):
                    places[s.warp, (first + s.lane + 32 * j) * VECTOR + v] = T.cast(acc[j, v], "bfloat16")
        if piece == last:
            write_facts(s, first + row.values - last * _PIECE, facts)
        T.fence_proxy_async()
        T.sync_warp()
        if s.lane == 0:
            count = T.if_then_else(piece == last, row.size - last * _PIECE, _PIECE)
            send(s, first, count, r, to, unit + piece * _PIECE)
        T.tma_store_arrive()
        sent[0] = (sent[0] + 1) % _PIECES
