"""The steps of the paged scores' kernel; scores/paged.py has the picture.

A chunk is 64 keys of a sequence. Thread block b takes the chunks from schedule[b] up to schedule[b + 1], each a
sequence and a chunk of it; those of one sequence are a run. The loading and the writing warp find the runs.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring, local_int
from tk_indexer.lib import fold
from tk_indexer.lib.fill import FILLED, fill_chunk
from tk_indexer.lib.fold import COLUMNS, KEYS, Fold
from tk_indexer.lib.paged_cache import SF_BYTES
from tk_indexer.lib.rows import FP4_GROUP
from tk_indexer.lib.widen_steps import alloc_tables, factor_of_row, widen_by_tables

_LANES = 32
_WIDE_BARRIER = 1
"""The first warpgroup's named barrier; the other two have the next ones."""


class Operands(NamedTuple):
    """The op's tensors in global memory, and its numbers. FP4 keys are uint32, of eight codes, and so are their sf."""

    q: T.Buffer  # e4m3 (B · next_n · heads, channels)
    k: T.Buffer  # e4m3 (blocks, rows, channels), a view of the cache: keys, and behind a block's keys its factors
    sf: T.Buffer  # float32 (blocks, words), another
    weights: T.Buffer  # float32 (B · next_n, heads)
    lengths: T.Buffer  # int32 (B, next_n)
    block_table: T.Buffer  # int32 (B, pages)
    schedule: T.Buffer  # int32 (thread blocks + 1, 2)
    out: T.Buffer  # (B · next_n, columns)
    most_keys: T.PrimExpr  # lengths above are clamped


class Atoms(NamedTuple):
    """How a sequence's queries are shared out among products, which take the same keys one after the other."""

    num_heads: int
    next_n: int
    num: int
    num_queries: int  # of each; in the last one some may be missing

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return self.num_queries * self.num_heads


class Keys(NamedTuple):
    """The stages of keys in shared memory, in the cache's dtypes."""

    k: T.Buffer  # e4m3 (stages, 64, channels), or uint32 (stages, 64, channels / 8)
    sf: T.Buffer  # float32, or uint32, (stages, 64)
    is_listed: T.Buffer  # int32 (stages, pages of a chunk): whether the page is in the cache
    wide: "T.Buffer | None"  # e4m3 (two for each warpgroup, 64, channels): FP4 of a stage, modulo their number, widened
    tables: "T.Buffer | None"  # of widen_steps.py


class Queries(NamedTuple):
    """The stages of runs in shared memory: two, so that the next run's queries are there when one ends."""

    q: T.Buffer  # e4m3 (2, columns of all atoms, channels)
    weights: T.Buffer  # float32 (2, columns of all atoms)
    end: T.Buffer  # int32 (2, queries of all atoms): each query's number of keys
    run: T.Buffer  # int32 (2, fields of Run)


class Run(NamedTuple):
    """A run, each an int32 (1) in registers."""

    seq: T.Buffer  # its sequence; negative behind the last run
    chunk: T.Buffer  # its first chunk
    num_chunks: T.Buffer


class Scheduler(NamedTuple):
    """The search for a thread block's next run, in a warp. Lane i has the length of sequence first + i."""

    x: Operands
    end_seq: T.Buffer  # int32 (1): the last sequence,
    end_chunk: T.Buffer  # int32 (1): and the end in it
    first: T.Buffer  # int32 (1)
    length: T.Buffer  # int32 (1): keys of the lane's sequence
    run: Run  # behind the last one, the sequence is the number of sequences


class Rings(NamedTuple):
    """The rings of keys and of runs; a warp's place in each."""

    keys: Ring
    queries: Ring


class Share(NamedTuple):
    """What a warpgroup multiplies and folds: chunks warpgroup, warpgroup + num_warpgroups, …"""

    warpgroup: int
    num_warpgroups: int
    atoms: Atoms
    x: Operands
    keys: Keys
    queries: Queries
    rings: Rings
    fold: Fold
    end: T.Buffer  # int32 (queries of a lane), in registers: their numbers of keys


def atoms(num_heads: int, next_n: int) -> Atoms:
    """As few atoms as have room for all queries, all of one size."""
    num = -(-next_n * num_heads // COLUMNS)
    return Atoms(num_heads, next_n, num, -(-next_n // num))


def keys(num_stages: int, dim: int, block_kv: int, num_wide: int) -> Keys:
    """The stages of keys: of FP4, if there is room to widen some."""
    is_fp4 = num_wide > 0
    width, dtype, sf_dtype = (dim // 8, "uint32", "uint32") if is_fp4 else (dim, "float8_e4m3fn", "float32")
    k, sf = T.alloc_shared((num_stages, KEYS, width), dtype), T.alloc_shared((num_stages, KEYS), sf_dtype)
    is_listed = T.alloc_shared((num_stages, _pages(block_kv)), "int32", scope="shared")
    if not is_fp4:
        return Keys(k, sf, is_listed, None, None)
    return Keys(k, sf, is_listed, T.alloc_shared((num_wide, KEYS, dim), "float8_e4m3fn"), alloc_tables())


def _pages(block_kv: int) -> int:
    return max(KEYS // block_kv, 1)


def queries(a: Atoms, dim: int) -> Queries:
    """The stages of runs."""
    columns = a.num * a.columns
    q, weights = T.alloc_shared((2, columns, dim), "float8_e4m3fn"), T.alloc_shared((2, columns), "float32")
    end = T.alloc_shared((2, a.num * a.num_queries), "int32", scope="shared")
    return Queries(q, weights, end, T.alloc_shared((2, len(Run._fields)), "int32", scope="shared"))


def local_run() -> Run:
    """A run in registers."""
    return Run(*(local_int() for _ in Run._fields))


def share(warpgroup: int, num_warpgroups: int, a: Atoms, x: Operands, k: Keys, q: Queries, rings: Rings) -> Share:
    """A warpgroup's share."""
    end = T.alloc_local((fold.per_lane(a.num_queries),), "int32")
    return Share(warpgroup, num_warpgroups, a, x, k, q, rings, fold.fold(a.num_heads, a.num_queries), end)


def start(x: Operands, block: T.PrimExpr) -> Scheduler:
    """The search, at the thread block's first run."""
    s = Scheduler(x, *(local_int() for _ in range(4)), local_run())
    _start(s, block)
    return s


@T.macro
def _start(s: Scheduler, block: T.PrimExpr) -> None:
    s.run.seq[0] = T.max(s.x.schedule[block, 0], 0)
    s.run.chunk[0] = T.max(s.x.schedule[block, 1], 0)
    s.end_seq[0] = s.x.schedule[block + 1, 0]
    s.end_chunk[0] = s.x.schedule[block + 1, 1]
    _read_lengths(s)
    _find(s)


@T.macro
def _read_lengths(s: Scheduler) -> None:
    """Read the lengths of 32 sequences from the run's on: that of a sequence is its queries' longest."""
    num_seqs, next_n = s.x.lengths.shape
    s.first[0] = s.run.seq[0]
    s.length[0] = 0
    if T.get_thread_binding() % _LANES < num_seqs - s.first[0]:
        for i in T.unroll(next_n):
            length = s.x.lengths[s.first[0] + T.get_thread_binding() % _LANES, i]
            s.length[0] = T.max(s.length[0], T.min(length, s.x.most_keys))


@T.macro
def next_run(s: Scheduler) -> None:
    """Find the thread block's next run."""
    s.run.seq[0] += 1
    s.run.chunk[0] = 0
    _find(s)


@T.macro
def _find(s: Scheduler) -> None:
    """Skip sequences of which the thread block has no chunk."""
    num_seqs = s.x.lengths.shape[0]
    length, end = T.alloc_var("int32"), T.alloc_var("int32")
    s.run.num_chunks[0] = 0
    while s.run.num_chunks[0] == 0 and s.run.seq[0] < num_seqs:
        if s.run.seq[0] > s.end_seq[0]:
            s.run.seq[0] = num_seqs
        else:
            if s.run.seq[0] - s.first[0] >= _LANES:
                _read_lengths(s)
            length = T.shfl_sync(s.length[0], s.run.seq[0] - s.first[0])
            end = num_chunks(length)
            if s.run.seq[0] == s.end_seq[0]:
                end = T.min(end, s.end_chunk[0])
            if s.run.chunk[0] < end:
                s.run.num_chunks[0] = end - s.run.chunk[0]
            else:
                s.run.seq[0] += 1
                s.run.chunk[0] = 0


def num_chunks(length: T.PrimExpr) -> T.PrimExpr:
    """Chunks of a sequence of this length, which may be any int32 from 0 on."""
    return T.shift_right(length, 6) + T.min(T.bitwise_and(length, KEYS - 1), 1)


@T.macro
def load(s: Scheduler, a: Atoms, block_kv: int, to_keys: Keys, to_queries: Queries, rings: Rings) -> None:
    """In the loading warp: load a run's queries, then chunk after chunk of its keys, by TMA.

    What is not in the cache is zeros, which TMA writes without a read. Each lane has an entry of the block table, and
    one of those 32 pages ahead.
    """
    x, lane = s.x, T.get_thread_binding() % _LANES
    num_seqs, num_blocks, rows = x.lengths.shape[0], x.k.shape[0], min(block_kv, KEYS)
    first_sf = block_kv * int(x.k.shape[2]) * T.dtype(x.k.dtype).bits // (8 * SF_BYTES)
    page, first, entry, next_entry, block = (T.alloc_var("int32") for _ in range(5))
    while s.run.seq[0] < num_seqs:
        q_stage = ring.wait_empty(rings.queries)
        for i in T.unroll(a.num):
            column = s.run.seq[0] * (a.next_n * a.num_heads) + i * a.columns
            target = to_queries.q[q_stage, i * a.columns : (i + 1) * a.columns, :]
            ring.load(rings.queries, x.q[column : column + a.columns, :], target)
        ring.fill(rings.queries)
        first = T.truncdiv(s.run.chunk[0] * KEYS, block_kv)
        entry = find_block(x, s.run.seq[0], first + lane)
        next_entry = find_block(x, s.run.seq[0], first + _LANES + lane)
        for step in T.serial(s.run.num_chunks[0]):
            key = (s.run.chunk[0] + step) * KEYS
            stage = ring.wait_empty(rings.keys)
            for part in T.unroll(KEYS // rows):
                page = T.truncdiv(key, block_kv) + part
                if page - first == _LANES:
                    first = page
                    entry = next_entry
                    next_entry = find_block(x, s.run.seq[0], first + _LANES + lane)
                block = T.shfl_sync(entry, page - first)
                row = T.truncmod(key, block_kv)
                target = slice(part * rows, (part + 1) * rows)
                words = slice(first_sf + row, first_sf + row + rows)
                ring.load(rings.keys, x.sf[block, words], to_keys.sf[stage, target])
                ring.load(rings.keys, x.k[block, row : row + rows, :], to_keys.k[stage, target, :])
                if T.shuffle_elect(_LANES):
                    to_keys.is_listed[stage, part] = T.if_then_else(block >= 0 and block < num_blocks, 1, 0)
            ring.fill(rings.keys)
        next_run(s)
    ring.wait_empty(rings.queries)
    ring.fill(rings.queries)  # The end's, which only the writing warp has something for.


@T.macro
def find_block(x: Operands, seq: T.PrimExpr, page: T.PrimExpr) -> T.PrimExpr:
    """The block of a sequence's page; negative if the table has no such page."""
    block = T.alloc_var("int32", init=-1)
    if page < x.block_table.shape[1]:
        block = x.block_table[seq, page]
    return block


@T.macro
def write(s: Scheduler, a: Atoms, to: Queries, rings: Rings) -> None:
    """In the writing warp: write the same runs' coordinates, weights and lengths, and the end."""
    x, lane = s.x, T.get_thread_binding() % _LANES
    num_seqs, columns = x.lengths.shape[0], a.num * a.columns
    while s.run.seq[0] < num_seqs:
        stage = ring.wait_empty(rings.queries)
        for i in T.unroll(-(-columns // _LANES)):
            column = i * _LANES + lane
            if column < columns:
                to.weights[stage, column] = T.float32(0)
                if column < a.next_n * a.num_heads:
                    row = s.run.seq[0] * a.next_n + column // a.num_heads
                    to.weights[stage, column] = x.weights[row, column % a.num_heads]
        if lane < a.num * a.num_queries:
            to.end[stage, lane] = 0
            if lane < a.next_n:
                to.end[stage, lane] = T.min(x.lengths[s.run.seq[0], lane], x.most_keys)
        if T.shuffle_elect(_LANES):
            ring.send(s.run, to.run, stage)
        ring.fill_by_lanes(rings.queries)
        next_run(s)
    s.run.seq[0] = -1
    stage = ring.wait_empty(rings.queries)
    if T.shuffle_elect(_LANES):
        ring.send(s.run, to.run, stage)
    ring.fill_by_lanes(rings.queries)


@T.macro
def fill(x: Operands, block: T.PrimExpr) -> None:
    """In two warps: write -∞ behind the rows' ends."""
    (num_rows, num_cols), next_n, num_blocks = x.out.shape, int(x.lengths.shape[1]), x.schedule.shape[0] - 1
    index, row, chunk, end = (T.alloc_var("int32") for _ in range(4))
    num_fills = T.ceildiv(num_cols, FILLED)
    index = 2 * block + T.get_thread_binding() // 32 % 2
    while index < num_rows * num_fills:
        row = T.truncdiv(index, num_fills)
        chunk = T.truncmod(index, num_fills)
        end = T.max(T.min(x.lengths[T.truncdiv(row, next_n), T.truncmod(row, next_n)], x.most_keys), 0)
        fill_chunk(x.out, row, chunk, 0, end)
        index += 2 * num_blocks


@T.macro
def score(s: Share, products: T.Buffer, is_async: bool) -> None:
    """In a warpgroup: the scores of its chunks.

    It folds a product while the tensor core computes those of the other warpgroups.
    """
    run, keys, chunk = local_run(), s.rings.keys, T.alloc_var("int32")
    chunk = s.warpgroup
    keys.stage[0] = s.warpgroup
    ring.wait_full(s.rings.queries)
    ring.receive(run, s.queries.run, s.rings.queries.stage[0])
    while run.seq[0] >= 0:
        if s.atoms.num == 1:
            _read_queries(s, 0)
        while chunk < run.num_chunks[0]:
            ring.wait_full(keys)
            _score_chunk(s, run, (run.chunk[0] + chunk) * KEYS, products, is_async)
            for _ in T.unroll(s.num_warpgroups):
                ring.move_on(keys)
            chunk += s.num_warpgroups
        chunk -= run.num_chunks[0]
        ring.release_by_lanes(s.rings.queries, s.rings.queries.stage[0])
        ring.move_on(s.rings.queries)
        ring.wait_full(s.rings.queries)
        ring.receive(run, s.queries.run, s.rings.queries.stage[0])


@T.macro
def _score_chunk(s: Share, run: Run, key: T.PrimExpr, products: T.Buffer, is_async: bool) -> None:
    stage, of_lane, num_pages = s.rings.keys.stage[0], fold.key_of_lane(), s.keys.is_listed.shape[1]
    is_fp8 = s.keys.wide is None
    sf, is_listed = T.alloc_var("float32"), T.alloc_var("int32", init=0)
    if T.get_thread_binding() % _LANES == 0:  # The lane that releases the stage; a warp's keys are in one page.
        is_listed = s.keys.is_listed[stage, of_lane * num_pages // KEYS]
    is_listed = T.shfl_sync(is_listed, 0)
    sf = s.keys.sf[stage, of_lane] if is_fp8 else _widen(s, stage)
    for i in T.serial(s.atoms.num):
        if is_async:
            _multiply(s, stage, i * s.atoms.columns, products)
            if s.atoms.num > 1:
                _read_queries(s, i)
            T.wait_wgmma(0)
        else:
            _multiply_in_turn(s, stage, i * s.atoms.columns, products)
            if s.atoms.num > 1:
                _read_queries(s, i)
        if is_fp8 and i == s.atoms.num - 1:
            _release(s, stage)
        _store(s, run.seq[0] * s.atoms.next_n + i * s.atoms.num_queries, key + of_lane, is_listed, sf, products)


@T.macro
def _widen(s: Share, stage: T.PrimExpr) -> T.PrimExpr:
    """Widen a stage's keys, give the stage back, and return the factor of the lane's key. A thread has whole groups."""
    dim, thread = int(s.keys.wide.shape[2]), T.get_thread_binding() % 128
    groups = dim // FP4_GROUP
    codes, of_row, words = (T.alloc_local((size,), "uint32") for size in (4, 1, 8))
    factor = T.alloc_var("float32")
    bytes_ = T.view(words, (FP4_GROUP,), "float8_e4m3fn")
    for part in T.unroll(KEYS * groups // 128):
        row, group = part * (128 // groups) + thread // groups, thread % groups
        of_row[0] = s.keys.sf[stage, row]
        for i in T.vectorized(4):
            codes[i] = s.keys.k[stage, row, group * 4 + i]
        widen_by_tables(codes, of_row, group, dim, s.keys.tables, words)
        for half in T.unroll(2):
            for v in T.vectorized(16):
                s.keys.wide[_operand(s, stage)[1], row, group * FP4_GROUP + half * 16 + v] = bytes_[half * 16 + v]
    of_row[0] = s.keys.sf[stage, fold.key_of_lane()]
    factor = T.reinterpret(factor_of_row(of_row, dim), "float32")
    # The tensor core reads what other threads wrote. It has also read, then, what the next chunk will overwrite.
    T.fence_proxy_async()
    T.sync_threads(_WIDE_BARRIER + s.warpgroup, 128)
    ring.release(s.rings.keys, stage)
    return factor


def _operand(s: Share, stage: T.PrimExpr) -> tuple[T.Buffer, T.PrimExpr]:
    """A stage's keys as the tensor core takes them: a buffer, and an index of it."""
    if s.keys.wide is None:
        return s.keys.k, stage
    return s.keys.wide, T.truncmod(stage, int(s.keys.wide.shape[0]))


@T.macro
def _read_queries(s: Share, atom: T.PrimExpr) -> None:
    """Read the weights and the lengths of an atom's queries."""
    stage, num_queries = s.rings.queries.stage[0], s.atoms.num_queries
    fold.read_weights(s.fold, s.queries.weights, stage, atom * s.atoms.columns)
    first = fold.first_query_of_lane(num_queries)
    for x in T.unroll(s.end.shape[0]):
        s.end[x] = s.queries.end[stage, atom * num_queries + first + x]
    # All lanes have the scores of a query in the middle: half of them store.
    if num_queries % 2 == 1 and T.get_thread_binding() % 4 >= 2:
        s.end[0] = 0


@T.macro
def _release(s: Share, stage: T.PrimExpr) -> None:
    T.fence_proxy_async()  # Else TMA may overwrite factors that are still to be read.
    ring.release(s.rings.keys, stage)


@T.macro
def _multiply(s: Share, stage: T.PrimExpr, column: T.PrimExpr, products: T.Buffer) -> None:
    """Begin products = a stage's keys times the queries from a column on."""
    k, index = _operand(s, stage)
    T.wgmma_gemm(
        k[index, :, :],
        s.queries.q[s.rings.queries.stage[0], column : column + s.atoms.columns, :],
        products,
        transpose_B=True,
        policy=T.GemmWarpPolicy.FullRow,
        clear_accum=True,
    )


@T.macro
def _multiply_in_turn(s: Share, stage: T.PrimExpr, column: T.PrimExpr, products: T.Buffer) -> None:
    """The same without WGMMA, 32 channels at a time: for more there are no registers."""
    k, index = _operand(s, stage)
    T.clear(products)
    for step in T.unroll(k.shape[2] // 32, unroll_factor=1):
        channels = slice(step * 32, step * 32 + 32)
        T.gemm(
            k[index, :, channels],
            s.queries.q[s.rings.queries.stage[0], column : column + s.atoms.columns, channels],
            products,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
        )


@T.macro
def _store(
    s: Share, row: T.PrimExpr, key: T.PrimExpr, is_listed: T.PrimExpr, sf: T.PrimExpr, products: T.Buffer
) -> None:
    """Store the lane's key's scores for the queries from `row` on, if they see it."""
    out, first = s.x.out, row + fold.first_query_of_lane(s.atoms.num_queries)
    fold.sum_heads(s.fold, products)
    for x in T.unroll(s.end.shape[0]):
        if key < s.end[x]:
            score = T.if_then_else(is_listed != 0, sf * s.fold.sums[0, x], -T.infinity("float32"))
            out[first + x, key] = T.cast(score, out.dtype)
