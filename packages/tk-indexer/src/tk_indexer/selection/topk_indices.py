"""topk_indices: the columns of the k largest of each row, in ascending order, turned into what sparse attention reads.

    candidates  columns [starts[r], ends[r]) of logits[r] whose value is not -∞
    winners     the k largest; any NaN counts as above +∞, +0 as equal to -0; of equals the smaller column wins
    out[r]      the winners' columns minus starts[r], ascending, then -1
                + offsets[r], or, by pages: block_table[b, i // block_size] · block_size + i % block_size

logits float32 or bfloat16 (R, N), out int32 (R, k).

A key is the uint32 that sorts like the value. A thread block, or a cluster of them with a share of the columns each,
takes a row:

    1. A sample of the row gives the least of the keys that are counted and the width of 512 to 2048 bins.
    2. A pass over the row counts keys by bins. The bin that holds the k-th best becomes the range; what is in the bins
       above it wins. While the range has more candidates than fit into shared memory, it is counted by finer bins.
    3. A pass over the row, from its end back, marks winners by a bit for each column and lists the range. Of few
       candidates each is compared with all others. A longer list is narrowed by finer bins, until all of the range
       wins, or until its keys are equal: then the first columns win.
    4. Sums over the marks give each winner its place.

    keys     0 ─── LEAST_KEY ───────── low ── bin 0 ── bin 1 ── … ── bin j ── … ── last bin ─── 2³² - 1
             no candidates    not counted                           the range      winners

What a thread block's registers hold is loaded once, the rest of a row twice, the second time mostly from L2. A third
pass is needed if the sample misleads, if many keys share their upper bits, or if a block has more columns than bits for
them. All sums are of integers, so the result does not depend on the order of the atomics.

The blocks of a cluster read each other's counts between the cluster's barriers: sums of groups of bins, then the bins
of one group. Counts of the blocks with lower columns also tell a block where its winners begin in the result.
"""

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op

MAX_K = 4096
FEW = 64
"""Candidates of a range that are compared with each other instead of counted by bins again."""
_LEAST_SHARE = 16384
"""The fewest columns that a thread block of a cluster gets, while there are any left: what it loads at a time."""
_NUM_GPCS = 8

# Bits of the kernel's argument `given`.
STARTS, ENDS, OFFSETS, BLOCK_TABLE, ROW_TO_BATCH, RAW_OUT = (1 << bit for bit in range(6))


@dataclass(frozen=True)
class TopkIndicesConfig:
    """How rows are distributed; docs/tuning/tk-indexer.md has what was measured."""

    threads: int
    """Threads of a thread block."""
    blocks_per_sm: int
    """Thread blocks that an SM should hold, which bounds their registers."""
    cluster_size: int
    """Thread blocks that share a row."""
    at_a_time: int
    """Columns that a thread has in registers."""
    num_words: int
    """Bits for columns that a thread block has at a time, in words of 32."""
    room: int
    """Candidates that a thread block can list, at least k."""

    @staticmethod
    def best(num_rows: int, num_cols: int, k: int, num_sms: int, arch: Arch) -> "TopkIndicesConfig":
        """The configuration for logits (num_rows, num_cols) on `num_sms` SMs."""
        cluster_size = 1
        if num_rows > num_sms:
            # Rows stay in registers; several blocks on an SM hide each other's latency.
            for threads, blocks in ((128, 7), (256, 3)):
                if num_cols <= 36 * threads - 62:
                    return TopkIndicesConfig(threads, blocks, 1, 36, 9 * threads // 8, 1024 if k <= 1024 else MAX_K)
            # Two blocks on an SM, unless their rows do not fit into L2 at once: then they are read twice from memory.
            if num_cols <= 32768 - 62:
                return TopkIndicesConfig(512, 2, 1, 16, 1024, MAX_K)
        elif arch.sm in (90, 100, 103):
            # Several sizes, as each is a kernel of its own.
            for size in (2, 3, 4, 8, 16):
                if num_cols >= size * _LEAST_SHARE and num_rows <= _clusters_at_once(size, num_sms):
                    cluster_size = size
        num_words = 16384 if arch.max_shared_memory > 2**17 + 2**16 else 4096
        return TopkIndicesConfig(1024, 1, cluster_size, 16, num_words, MAX_K)

    @property
    def num_bins(self) -> int:
        """Bins that candidates are counted by, at least 512: LEAST_KEY has to be above the width of a bin."""
        return max(2 * self.threads, 512)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a thread block, without sums and the padding that aligns the arrays."""
        return 4 * (self.num_bins + 2 * self.num_words + 2 * self.room + 2 * FEW)


def _clusters_at_once(size: int, num_sms: int) -> int:
    """How many clusters surely run at once.

    The blocks of a cluster share a GPC. GPCs have 18 SMs at most, and an even number, but which is not known: an H100
    may have some of 14, and then holds 30 clusters of four instead of 32.
    """
    if size == 16:
        return num_sms // 32 if num_sms > 120 else 0  # five of eight GPCs have 16 SMs, if there are 132
    unused = size - 2 + size % 2  # SMs of a GPC, at most
    return max(num_sms - _NUM_GPCS * unused, 0) // size


# Written per thread: a histogram and bits have no operations on tiles. Blocks of a cluster read each other's shared
# memory, which TileLang does not see, so all barriers are explicit and shared memory is not reused.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_thread_storage_sync": True,
        "tl.disable_shared_memory_reuse": True,
    }
)
def _topk_indices_kernel(dtype: torch.dtype, config: TopkIndicesConfig, arch: Arch) -> Any:
    """One program for all options. A tensor that is not given is any other of its shape, and `given` says so."""
    import tilelang.language as T

    from tk_indexer.device.cluster import cluster_arrive, cluster_arrive_first, cluster_wait
    from tk_indexer.device.row_words import past_16_bytes
    from tk_indexer.lib import topk_indices_steps as steps

    threads, cluster_size, room, num_bins = config.threads, config.cluster_size, config.room, config.num_bins
    elements = steps.per_load("float32" if dtype == torch.float32 else "bfloat16")
    loads = -(-config.at_a_time // elements)
    # Whether a thread block has its whole row in registers.
    is_kept = cluster_size == 1 and threads * config.at_a_time >= 32 * config.num_words
    least_words = _LEAST_SHARE // 32
    num_rows, num_cols, k = T.dynamic("num_rows"), T.dynamic("num_cols"), T.dynamic("k")
    num_batches, num_pages = T.dynamic("num_batches"), T.dynamic("num_pages")
    stride, table_stride, raw_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("stride", "table_stride", "raw_stride", "out_stride")
    )

    @T.macro
    def arrive() -> None:
        if cluster_size > 1:
            cluster_arrive()

    @T.macro
    def wait() -> None:
        if cluster_size > 1:
            cluster_wait()

    @T.prim_func
    def topk_indices(
        logits: T.StridedTensor((num_rows, num_cols), (stride, 1), dtype),
        starts: T.Tensor((num_rows,), "int32"),
        ends: T.Tensor((num_rows,), "int32"),
        offsets: T.Tensor((num_rows,), "int32"),
        block_table: T.StridedTensor((num_batches, num_pages), (table_stride, 1), "int32"),
        row_to_batch: T.Tensor((num_rows,), "int32"),
        raw_out: T.StridedTensor((num_rows, k), (raw_stride, 1), "int32"),
        out: T.StridedTensor((num_rows, k), (out_stride, 1), "int32"),
        counts: T.Tensor((num_rows,), "int32"),
        given: T.int32,
        block_size: T.int32,
        rows_per_batch: T.int32,
    ) -> None:
        with T.Kernel(num_rows * cluster_size, threads=threads, cluster_dims=cluster_size) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            thread = T.get_thread_binding()
            index, rank = block // cluster_size, block % cluster_size

            # The window, and the words of its columns that this block has.
            start, end, batch = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            start, end, batch = 0, num_cols, 0
            if given & STARTS:
                start = T.max(T.min(starts[index], num_cols), 0)
            if given & ENDS:
                end = T.min(ends[index], num_cols)
            if given & BLOCK_TABLE:
                batch = T.truncdiv(index, rows_per_batch)
                if given & ROW_TO_BATCH:
                    batch = row_to_batch[index]
                    if batch < 0 or batch >= num_batches:
                        end = start
            end = T.max(end, start)
            row = steps.Row(logits, index, start, end)
            size = 4 if dtype == torch.float32 else 2
            column, words, share = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            column = (start + past_16_bytes(T.address_of(logits[index, 0])) // size) & 31  # bits before the window
            words = T.cast((T.cast(end - start, "uint32") + T.cast(column + 31, "uint32")) >> T.uint32(5), "int32")
            if end == start:
                words = 0
            column = start - column
            window = steps.span_of(row, column, words)
            share = T.max(T.ceildiv(words, cluster_size), least_words)
            own_words = T.max(T.min(words - rank * share, share), 0)
            own = steps.span_of(row, column + rank * share * 32, own_words)

            bins, marks, listed, few, found, extremes = steps.shared_arrays(num_bins, config.num_words, room, threads)
            search, batch_of_row = steps.registers(loads, is_kept)

            # Search for the threshold. At the loop's begin and end, this block has arrived at the cluster's barrier: it
            # has read what it needs from the others' shared memory, and what it has listed is there.
            goes_on, is_listed, fits = T.alloc_var("bool"), T.alloc_var("bool"), T.alloc_var("bool")
            goes_on, is_listed = end > start, False
            fits = own_words <= config.num_words
            steps.search_all(search, k)
            if cluster_size > 1:
                cluster_arrive_first()
            steps.load_first(row, own, batch_of_row)
            steps.sample(row, window, k, extremes, batch_of_row, search, num_bins)
            while goes_on:
                wait()
                steps.clear(bins.counts, num_bins + 4)
                T.sync_threads()
                if is_listed:
                    steps.count_listed(listed, search, bins)
                else:
                    steps.count_row(row, own, batch_of_row, search, bins)
                T.sync_threads()
                steps.sum_groups(bins)
                if cluster_size > 1:
                    arrive()
                    wait()
                else:
                    T.sync_threads()
                steps.find(bins, cluster_size, rank, search, found)
                T.sync_threads()
                goes_on = steps.narrow(found, k, search, num_bins)
                if goes_on and not is_listed and search.count[0] <= room:
                    is_listed = True
                    steps.clear(marks.above, T.min(own_words, config.num_words))
                    steps.clear(marks.within, T.min(own_words, config.num_words))
                    if thread == 0:
                        listed.count[0] = 0
                        few.count[0] = 0
                    T.sync_threads()
                    steps.mark_row(row, own, batch_of_row, search, marks, fits, listed)
                    if search.count[0] <= FEW:
                        goes_on = False
                        if cluster_size > 1:
                            arrive()
                            wait()
                            steps.gather_few(listed, cluster_size, rank, few)
                            T.sync_threads()
                            steps.rank_few(few.keys, few.is_before, search, found)
                        else:
                            T.sync_threads()
                            steps.rank_few(listed.keys, None, search, found)
                arrive()
            wait()

            # Winners of the blocks before this one.
            before = T.alloc_local((2,), "int32")
            first = T.alloc_var("int32")
            before[0], before[1] = search.above[0], search.within[0]
            first = before[0] + T.min(before[1], search.need[0])

            winners = T.view(listed.keys, (room,), "int32")
            for chunk in T.serial(T.ceildiv(own_words, config.num_words)):
                chunk_words = T.min(own_words - chunk * config.num_words, config.num_words)
                span = steps.span_of(row, own.column + chunk * config.num_words * 32, chunk_words)
                if is_listed and fits:
                    steps.mark_listed(listed, search, marks)
                else:
                    T.sync_threads()  # until the marks of the chunk before are read
                    steps.clear(marks.above, chunk_words)
                    steps.clear(marks.within, chunk_words)
                    if not fits:
                        steps.load_first(row, span, batch_of_row)
                    T.sync_threads()
                    steps.mark_row(row, span, batch_of_row, search, marks, True, None)
                T.sync_threads()
                steps.emit(marks, span, search.need[0], first, before, winners)
            T.sync_threads()

            end_of_own = T.alloc_var("int32")
            end_of_own = before[0] + T.min(before[1], search.need[0])
            results = steps.Results(raw_out, out, counts, offsets, block_table, given, block_size)
            steps.write_winners(results, index, batch, start, winners, first, end_of_own)
            if rank == cluster_size - 1:
                steps.write_rest(results, index, end_of_own, k)

    return topk_indices


def _check_data(
    num_cols: int,
    starts: Tensor | None,
    ends: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
    row_to_batch: Tensor | None,
) -> None:
    """With TK_DEBUG: raise for what is too large."""
    for name, bound in (("starts", starts), ("ends", ends)):
        if bound is not None:
            check.below(name, bound, num_cols + 1, "columns below {}")
    if block_table is not None:
        check.below("block_table", block_table, 2**31 // block_size, "blocks below {}")
        if row_to_batch is not None:
            check.below("row_to_batch", row_to_batch, block_table.shape[0], "rows of block_table below {}")


@overload
def topk_indices(
    logits: Tensor,
    k: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int = 1,
    rows_per_batch: int = 1,
    row_to_batch: Tensor | None = None,
    raw_out: Tensor | None = None,
    out: Tensor | None = None,
    return_counts: Literal[False] = False,
) -> Tensor: ...


@overload
def topk_indices(
    logits: Tensor,
    k: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int = 1,
    rows_per_batch: int = 1,
    row_to_batch: Tensor | None = None,
    raw_out: Tensor | None = None,
    out: Tensor | None = None,
    return_counts: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@op(writes=("raw_out", "out"), aligned=(), min_sm=90)
def topk_indices(
    logits: Tensor,
    k: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int = 1,
    rows_per_batch: int = 1,
    row_to_batch: Tensor | None = None,
    raw_out: Tensor | None = None,
    out: Tensor | None = None,
    return_counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Columns of the k largest values of each row, ascending: the keys that sparse attention reads for a query.

    The candidates of row r are the columns from starts[r] up to, not including, ends[r] whose value is not -inf, so
    masked scores need no starts and ends. The k largest win; any NaN counts as larger than +inf, -0 equals +0, and
    of equal values the smaller column wins. So the selection is the same in every run, on every device. Columns count
    from starts[r]; where there are fewer than k candidates, -1 fills the rest.

    With `offsets`, out[r, j] is the column plus offsets[r]. With `block_table`, it is a position in a paged cache:
    column i becomes block_table[b, i // block_size] * block_size + i % block_size, where b is row_to_batch[r], or if
    that is not given r // rows_per_batch. Columns on a page whose block is negative or not in the table become -1, in
    place. Padding stays -1.

    Nothing is read back to the host. With TK_DEBUG=1, starts and ends above N, rows of block_table in row_to_batch that
    it does not have, and blocks whose positions exceed int32 raise. Otherwise starts and ends are clamped to 0 … N,
    such rows are empty, and such blocks count as missing.

    Args:
        logits: float32 or bfloat16 (R, N), rows may be strided; N < 2^31.
        k: From 1 to 4096; may exceed N.
        starts: int32 (R), contiguous; None for 0.
        ends: int32 (R), contiguous; None for N.
        offsets: int32 (R), contiguous; not with block_table.
        block_table: int32 (B, M), rows may be strided: the blocks of each sequence's pages.
        block_size: Positions of a block, with block_table only.
        rows_per_batch: Consecutive rows that belong to one sequence, with block_table but without row_to_batch only;
            B * rows_per_batch >= R.
        row_to_batch: int32 (R), contiguous, with block_table only: the sequence of each row; negative for an empty row.
        raw_out: int32 (R, k), rows may be strided: receives the columns, before offsets or block_table.
        out: int32 (R, k), rows may be strided: receives the result; None to allocate it.
        return_counts: Whether to return the number of entries before the padding, too.

    Returns:
        int32 (R, k), `out` if that is given; with return_counts also int32 (R).

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range, offsets and block_table are both given, or
            an argument is given that needs block_table.
        UnsupportedArchError: The GPU is older than sm_90.
    """
    floats = torch.float32, torch.bfloat16
    num_rows, num_cols = check.tensor("logits", logits, floats, ("R", "N"), layout="rows")
    check.require(num_cols < 2**31, "logits", "fewer than 2^31 columns", num_cols)
    check.in_range("k", k, 1, MAX_K)
    check.in_range("block_size", block_size, 1, 2**31 - 1)
    check.in_range("rows_per_batch", rows_per_batch, 1, 2**31 - 1)
    check.flag("return_counts", return_counts)
    device, int32 = logits.device, (torch.int32,)
    for name, per_row in (("starts", starts), ("ends", ends), ("offsets", offsets), ("row_to_batch", row_to_batch)):
        if per_row is not None:
            check.tensor(name, per_row, int32, (num_rows,), device=device)
    for name, given in (("raw_out", raw_out), ("out", out)):
        if given is not None:
            check.tensor(name, given, int32, (num_rows, k), layout="rows", device=device)
    if block_table is None:
        check.require(block_size == 1, "block_size", "1 without block_table", block_size)
        check.require(row_to_batch is None, "row_to_batch", "None without block_table", "a tensor")
    else:
        num_batches, _ = check.tensor("block_table", block_table, int32, ("B", "M"), layout="rows", device=device)
        check.require(offsets is None, "offsets", "None with block_table", "a tensor")
        if row_to_batch is None:
            enough = num_rows <= num_batches * rows_per_batch
            check.require(enough, "block_table", "sequences for {} rows of logits", num_batches, num_rows)
    if block_table is None or row_to_batch is not None:
        only = "1 without block_table, or with row_to_batch"
        check.require(rows_per_batch == 1, "rows_per_batch", only, rows_per_batch)
    _check_data(num_cols, starts, ends, block_table, block_size, row_to_batch)
    if out is None:
        out = new(logits.new_empty, (num_rows, k), dtype=torch.int32)
    counts = new(logits.new_empty, (num_rows,), dtype=torch.int32) if return_counts else None
    if launching(out, raw_out, counts):
        if counts is None:
            counts = logits.new_empty((num_rows,), dtype=torch.int32)
        options = starts, ends, offsets, block_table, row_to_batch, raw_out
        _launch(logits, k, options, block_size, rows_per_batch, out, counts)
    return (out, counts) if return_counts else out


def _launch(
    logits: Tensor,
    k: int,
    options: tuple[Tensor | None, ...],
    block_size: int,
    rows_per_batch: int,
    out: Tensor,
    counts: Tensor,
) -> None:
    num_rows, num_cols = logits.shape
    if num_cols == 0:
        for x in (out, options[-1]):
            if x is not None:
                x.fill_(-1)
        counts.zero_()
        return
    arch = get_arch(logits.device)
    config = TopkIndicesConfig.best(num_rows, num_cols, k, get_num_sms(logits.device), arch)
    given = sum(1 << bit for bit, option in enumerate(options) if option is not None)
    # TileLang takes None for a tensor only if the kernel never reads it.
    instead = (counts, counts, counts, counts.view(-1, 1), counts, out)
    tensors = [other if option is None else option for option, other in zip(options, instead)]
    launch = _topk_indices_kernel(logits.dtype, config, arch)
    launch(logits, *tensors, out, counts, given, block_size, rows_per_batch)
