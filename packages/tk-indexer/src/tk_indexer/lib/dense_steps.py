"""The steps of the dense scores' kernel; scores/dense.py has the picture.

A run is up to `run_keys` consecutive keys for a block of queries; thread block b takes runs b, b + num_blocks, … The
loading and the writing warp find them, and skip those that no query's window reaches.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring, local_int
from tk_indexer.lib import fold
from tk_indexer.lib.fill import FILLED, fill_chunk
from tk_indexer.lib.fold import COLUMNS, KEYS, Fold

WARPGROUPS = 3
"""Warpgroups that multiply, each with queries of its own."""
RUN_COLUMNS = WARPGROUPS * COLUMNS
"""Heads of all queries of a run."""
STAGE_KEYS = 2 * KEYS
"""Keys of a stage: two products of each warpgroup."""
_LAST = 2**31 - 1


class Operands(NamedTuple):
    """The op's tensors in global memory, and its numbers."""

    q: T.Buffer  # e4m3 (S · heads, channels)
    k: T.Buffer  # e4m3 (N, channels)
    sf: T.Buffer  # float32 (1, N)
    weights: T.Buffer  # float32 (S, heads)
    starts: T.Buffer  # int32 (S)
    ends: T.Buffer  # int32 (S)
    out: T.Buffer  # (S, columns)
    max_seqlen: T.PrimExpr  # above 0: column 0 is a row's first key, and windows are cut


class Keys(NamedTuple):
    """The stages of keys in shared memory."""

    k: T.Buffer  # e4m3 (stages, 128, channels)
    sf: T.Buffer  # float32 (stages, 128)


class Queries(NamedTuple):
    """The stages of runs in shared memory: two, so that the next run's queries are there when one ends."""

    q: T.Buffer  # e4m3 (2, 384, channels)
    weights: T.Buffer  # float32 (2, 384)
    begin: T.Buffer  # int32 (2, queries): each query's first key
    end: T.Buffer  # int32 (2, queries): behind its last
    shift: T.Buffer  # int32 (2, queries): the key whose score is in column 0
    run: T.Buffer  # int32 (2, fields of Run)


class Run(NamedTuple):
    """A run, each an int32 (1) in registers."""

    row: T.Buffer  # its first query; negative behind the last run
    key: T.PrimExpr  # its first key
    num_keys: T.Buffer


class Scheduler(NamedTuple):
    """The search for a thread block's next run, in a warp. Lane i has the i-th query's window."""

    x: Operands
    num_queries: int  # of a run
    run_keys: T.PrimExpr
    num_row_blocks: T.PrimExpr
    num_blocks: T.PrimExpr
    index: T.Buffer  # int32 (1), the run's number
    total: T.Buffer  # int32 (1)
    begin: T.Buffer  # int32 (1)
    end: T.Buffer  # int32 (1)
    run: Run


class Windows(NamedTuple):
    """The windows of a lane's queries, in registers, int32 (queries of a lane)."""

    begin: T.Buffer
    end: T.Buffer
    shift: T.Buffer


class Rings(NamedTuple):
    """The rings of keys and of runs; a warp's place in each."""

    keys: Ring
    queries: Ring


class Share(NamedTuple):
    """What a warpgroup multiplies and folds: a third of a run's queries with all of its keys."""

    warpgroup: int
    x: Operands
    keys: Keys
    queries: Queries
    rings: Rings
    fold: Fold
    windows: Windows


def keys(num_stages: int, dim: int) -> Keys:
    """The stages of keys."""
    k = T.alloc_shared((num_stages, STAGE_KEYS, dim), "float8_e4m3fn")
    return Keys(k, T.alloc_shared((num_stages, STAGE_KEYS), "float32"))


def queries(num_heads: int, dim: int) -> Queries:
    """The stages of runs."""
    q, weights = T.alloc_shared((2, RUN_COLUMNS, dim), "float8_e4m3fn"), T.alloc_shared((2, RUN_COLUMNS), "float32")
    begin, end, shift = (T.alloc_shared((2, RUN_COLUMNS // num_heads), "int32", scope="shared") for _ in range(3))
    return Queries(q, weights, begin, end, shift, T.alloc_shared((2, len(Run._fields)), "int32", scope="shared"))


def local_run() -> Run:
    """A run in registers."""
    return Run(*(local_int() for _ in Run._fields))


def share(warpgroup: int, num_heads: int, x: Operands, k: Keys, q: Queries, rings: Rings) -> Share:
    """A warpgroup's share."""
    num_queries = COLUMNS // num_heads
    windows = Windows(*(T.alloc_local((fold.per_lane(num_queries),), "int32") for _ in Windows._fields))
    return Share(warpgroup, x, k, q, rings, fold.fold(num_heads, num_queries), windows)


@T.macro
def find_window(x: Operands, row: T.PrimExpr) -> tuple[T.PrimExpr, T.PrimExpr]:
    """A row's window of keys, clamped; an empty one if there is no such row."""
    begin, end, length = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0), T.alloc_var("int32")
    if row < x.out.shape[0]:
        begin = T.max(T.min(x.starts[row], x.k.shape[0]), 0)
        end = T.max(T.min(x.ends[row], x.k.shape[0]), begin)
        if x.max_seqlen > 0:
            length = end - begin
            if length > x.max_seqlen:  # The sum of both may overflow.
                end = begin + x.max_seqlen
    return begin, end


def start(x: Operands, run_keys: T.PrimExpr, num_blocks: T.PrimExpr, block: T.PrimExpr) -> Scheduler:
    """The search, at the thread block's first run."""
    num_queries = RUN_COLUMNS // int(x.weights.shape[1])
    num_row_blocks = T.ceildiv(x.out.shape[0], num_queries)
    counters = (local_int() for _ in range(4))
    s = Scheduler(x, num_queries, run_keys, num_row_blocks, num_blocks, *counters, local_run())
    _start(s, block)
    return s


@T.macro
def _start(s: Scheduler, block: T.PrimExpr) -> None:
    s.total[0] = s.num_row_blocks * T.ceildiv(s.x.k.shape[0], s.run_keys)
    s.index[0] = block
    _find(s)


@T.macro
def next_run(s: Scheduler) -> None:
    """Find the thread block's next run; s.index ≥ s.total if there is none."""
    s.index[0] += s.num_blocks
    _find(s)


@T.macro
def _find(s: Scheduler) -> None:
    lane = T.get_thread_binding() % 32
    first, last = T.alloc_var("int32"), T.alloc_var("int32")
    s.run.num_keys[0] = 0
    while s.index[0] < s.total[0] and s.run.num_keys[0] == 0:
        s.run.row[0] = T.truncmod(s.index[0], s.num_row_blocks) * s.num_queries
        s.begin[0], s.end[0] = find_window(s.x, T.if_then_else(lane < s.num_queries, s.run.row[0] + lane, _LAST))
        first = _LAST
        if s.begin[0] < s.end[0]:
            first = s.begin[0]
        first = T.warp_reduce_min(first)
        last = T.warp_reduce_max(s.end[0])
        if first < last:
            # Whole sectors of scores: neighbouring keys are in neighbouring columns.
            first = T.truncdiv(first, 16) * 16
            s.run.key[0] = T.truncdiv(s.index[0], s.num_row_blocks) * s.run_keys
            if s.run.key[0] < last - first:
                s.run.num_keys[0] = T.min(last - first - s.run.key[0], s.run_keys)
                s.run.key[0] += first
        if s.run.num_keys[0] == 0:
            s.index[0] += s.num_blocks


@T.macro
def load(s: Scheduler, to_keys: Keys, to_queries: Queries, rings: Rings) -> None:
    """In the loading warp: load queries and keys of one run after the other, by TMA."""
    num_heads = s.x.weights.shape[1]
    while s.index[0] < s.total[0]:
        q_stage = ring.wait_empty(rings.queries)
        for i in T.unroll(WARPGROUPS):
            column = s.run.row[0] * num_heads + i * COLUMNS
            target = to_queries.q[q_stage, i * COLUMNS : (i + 1) * COLUMNS, :]
            ring.load(rings.queries, s.x.q[column : column + COLUMNS, :], target)
        ring.fill(rings.queries)
        for step in T.serial(T.ceildiv(s.run.num_keys[0], STAGE_KEYS)):
            key = s.run.key[0] + step * STAGE_KEYS
            stage = ring.wait_empty(rings.keys)
            ring.load(rings.keys, s.x.sf[0, key : key + STAGE_KEYS], to_keys.sf[stage, :])
            ring.load(rings.keys, s.x.k[key : key + STAGE_KEYS, :], to_keys.k[stage, :, :])
            ring.fill(rings.keys)
        next_run(s)
    ring.wait_empty(rings.queries)
    ring.fill(rings.queries)  # The end's, which only the writing warp has something for.


@T.macro
def write(s: Scheduler, to: Queries, rings: Rings) -> None:
    """In the writing warp: write the same runs' coordinates, windows and weights, and the end."""
    lane, num_heads = T.get_thread_binding() % 32, s.x.weights.shape[1]
    while s.index[0] < s.total[0]:
        stage = ring.wait_empty(rings.queries)
        for x in T.unroll(RUN_COLUMNS // 32):
            row = s.run.row[0] + (x * 32 + lane) // num_heads
            to.weights[stage, x * 32 + lane] = T.float32(0)
            if row < s.x.weights.shape[0]:
                to.weights[stage, x * 32 + lane] = s.x.weights[row, (x * 32 + lane) % num_heads]
        if lane < s.num_queries:
            to.begin[stage, lane] = s.begin[0]
            to.end[stage, lane] = s.end[0]
            to.shift[stage, lane] = T.if_then_else(s.x.max_seqlen > 0, s.begin[0], 0)
        if T.shuffle_elect(32):
            ring.send(s.run, to.run, stage)
        ring.fill_by_lanes(rings.queries)
        next_run(s)
    s.run.row[0] = -1
    stage = ring.wait_empty(rings.queries)
    if T.shuffle_elect(32):
        ring.send(s.run, to.run, stage)
    ring.fill_by_lanes(rings.queries)


@T.macro
def fill(x: Operands, block: T.PrimExpr, num_blocks: T.PrimExpr) -> None:
    """In two warps: write -∞ outside of the rows' windows."""
    thread = T.get_thread_binding()
    num_rows, num_cols = x.out.shape
    index, row, chunk, begin, end = (T.alloc_var("int32") for _ in range(5))
    num_chunks = T.ceildiv(num_cols, FILLED)
    index = 2 * block + thread // 32 % 2
    while index < num_rows * num_chunks:
        row = T.truncdiv(index, num_chunks)
        chunk = T.truncmod(index, num_chunks)
        begin, end = find_window(x, row)
        if x.max_seqlen > 0:
            end = end - begin
            begin = 0
        fill_chunk(x.out, row, chunk, begin, end)
        index += 2 * num_blocks


@T.macro
def score(s: Share, products: T.Buffer, is_async: bool) -> None:
    """In a warpgroup: the scores of a third of each run's queries.

    It folds a product while the tensor core computes those of the other warpgroups.
    """
    run, key, sf = local_run(), T.alloc_var("int32"), T.alloc_var("float32")
    ring.wait_full(s.rings.queries)
    _receive(s, run)
    while run.row[0] >= 0:
        if is_async:
            _read_weights(s)
        key = run.key[0]
        for _ in T.serial(T.ceildiv(run.num_keys[0], STAGE_KEYS)):
            stage = s.rings.keys.stage[0]
            ring.wait_full(s.rings.keys)
            for x in T.unroll(STAGE_KEYS // KEYS):
                if is_async:
                    _multiply(s, stage, x * KEYS, products)
                else:
                    _multiply_in_turn(s, stage, x * KEYS, products)
                    _read_weights(s)  # Here there are no registers for them beside the product's operands.
                sf = s.keys.sf[stage, x * KEYS + fold.key_of_lane()]
                if is_async:
                    T.wait_wgmma(0)
                if x == STAGE_KEYS // KEYS - 1:
                    T.fence_proxy_async()  # Else TMA may overwrite factors that are still to be read.
                    ring.release(s.rings.keys, stage)
                _store(s, run, key, sf, products)
                key += KEYS
            ring.move_on(s.rings.keys)
        ring.release_by_lanes(s.rings.queries, s.rings.queries.stage[0])
        ring.move_on(s.rings.queries)
        ring.wait_full(s.rings.queries)
        _receive(s, run)


@T.macro
def _receive(s: Share, run: Run) -> None:
    """Read a run's coordinates and windows."""
    stage, num_lane_queries = s.rings.queries.stage[0], s.windows.begin.shape[0]
    ring.receive(run, s.queries.run, stage)
    for x in T.unroll(num_lane_queries):
        query = s.warpgroup * s.fold.num_queries + fold.first_query_of_lane(s.fold.num_queries) + x
        s.windows.begin[x] = s.queries.begin[stage, query]
        s.windows.end[x] = s.queries.end[stage, query]
        s.windows.shift[x] = s.queries.shift[stage, query]


@T.macro
def _read_weights(s: Share) -> None:
    fold.read_weights(s.fold, s.queries.weights, s.rings.queries.stage[0], s.warpgroup * COLUMNS)


@T.macro
def _multiply(s: Share, stage: T.PrimExpr, first: int, products: T.Buffer) -> None:
    """Begin products = a stage's keys from index `first` on times the warpgroup's queries."""
    q_stage, column = s.rings.queries.stage[0], s.warpgroup * COLUMNS
    T.wgmma_gemm(
        s.keys.k[stage, first : first + KEYS, :],
        s.queries.q[q_stage, column : column + COLUMNS, :],
        products,
        transpose_B=True,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=True,
    )


@T.macro
def _multiply_in_turn(s: Share, stage: T.PrimExpr, first: int, products: T.Buffer) -> None:
    """The same without WGMMA, 32 channels at a time: for more there are no registers."""
    q_stage, column = s.rings.queries.stage[0], s.warpgroup * COLUMNS
    T.clear(products)
    for step in T.unroll(s.keys.k.shape[2] // 32, unroll_factor=1):
        channels = slice(step * 32, step * 32 + 32)
        T.gemm(
            s.keys.k[stage, first : first + KEYS, channels],
            s.queries.q[q_stage, column : column + COLUMNS, channels],
            products,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
        )


@T.macro
def _store(s: Share, run: Run, key: T.PrimExpr, sf: T.PrimExpr, products: T.Buffer) -> None:
    """Store the scores of 64 keys from `key` on, of which sf is that of the lane's, if the windows have them."""
    num_lane_queries = s.windows.begin.shape[0]
    fold.sum_heads(s.fold, products)
    row = run.row[0] + s.warpgroup * s.fold.num_queries + fold.first_query_of_lane(s.fold.num_queries)
    at = key + fold.key_of_lane()
    for x in T.unroll(num_lane_queries):
        if at >= s.windows.begin[x] and at < s.windows.end[x]:
            s.x.out[row + x, at - s.windows.shift[x]] = T.cast(sf * s.fold.sums[0, x], s.x.out.dtype)
