"""The steps of topk_indices' kernel; selection/topk_indices.py has the algorithm.

Columns of a row are handled in words of 32, which are aligned in memory: bit 0 of the first word is a column at or
before the window's first. A `Span` is some of these words. The state of a search is in arrays of one element, as a
macro cannot assign to a scalar of its caller.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from tk_core.device.bits import atomic_or_u32, count_leading_zeros
from tk_core.headers import builtin
from tk_core.macros.block_scan import scan_two
from tk_indexer.device.cluster import load_from_cluster
from tk_indexer.device.row_words import is_above, load_16_bytes
from tk_indexer.selection.topk_indices import BLOCK_TABLE, FEW, OFFSETS, RAW_OUT

LEAST_KEY = 0x00800000
"""The least key of a candidate, one above the key of -∞."""
_TOP_KEY = 0xFFFFFFFF
_UNKNOWN = 0x7FFFFFFF
_INFINITY_KEY = 0xFF800000
_PAD = 4
_NEGATIVE_INFINITY = {"float32": 0xFF800000, "bfloat16": 0xFF80}


class Row(NamedTuple):
    """The row of a thread block, and its window of columns."""

    logits: Any
    index: Any
    start: Any
    end: Any


class Span(NamedTuple):
    """Consecutive words of a row's columns."""

    column: Any  # of bit 0 of the first word; may be before the row
    begin: Any  # first column in the span and in the window
    end: Any  # behind the last one, at most `begin` if there is none
    num_words: Any


class Batch(NamedTuple):
    """What a thread has of a span: 16 bytes of every so many, in registers. They outlive a pass over the span."""

    words: Any  # uint32 (4 · loads)
    index: Any  # int32 (1,): which batch of the span that is
    is_all: bool  # the span has no other


class Search(NamedTuple):
    """Keys among which the threshold is searched: from `low` to low + width. All are uint32 or int32 (1,) in registers.

    Candidates with larger keys are winners, and `need` more are wanted from the range.
    """

    low: Any
    width: Any
    shift: Any  # bin of a key: (key - low) >> shift, at most the last one
    need: Any
    count: Any  # candidates in the range
    above: Any  # candidates above the range in the columns before this block's
    within: Any  # and in it


class Found(NamedTuple):
    """The bin in which the count from the top reaches the number that is needed; int32 (1,) in shared memory."""

    bin: Any  # -1 if all bins together have fewer; the key if single candidates were compared
    above: Any  # count in the bins above it, or in all
    count: Any  # count in it
    before_above: Any  # the same of the columns before this block's
    before_count: Any


class Bins(NamedTuple):
    """Counts of a block's keys; int32 in shared memory."""

    counts: Any  # (number of bins + 4): bin j is at j + 1; in front of it all that is not in the range is counted
    groups: Any  # (warps): sums of as many bins each, from the largest keys down


class Marks(NamedTuple):
    """A bit for each column of a span; uint32 (num_words) in shared memory."""

    above: Any  # winners: their keys are above the range
    within: Any  # keys in the range, of which the first `need` win


class Listed(NamedTuple):
    """Candidates of the range in no order, in shared memory."""

    keys: Any  # uint32
    places: Any  # int32: column, counted from the column of bit 0 of the block's first word
    count: Any  # int32 (1,)


class Few(NamedTuple):
    """All candidates of a short range, those of the cluster's other blocks too; in shared memory."""

    keys: Any  # uint32 (FEW)
    is_before: Any  # int32 (FEW): 1 for columns before this block's
    count: Any  # int32 (1,)


def shared_arrays(
    num_bins: int, num_words: int, room: int, threads: int
) -> tuple[Bins, Marks, Listed, Few, Found, T.Buffer]:
    """What a thread block has in shared memory; the last array is for the extremes of warps."""

    def words(size: int, dtype: str = "int32") -> T.Buffer:
        return T.alloc_shared((size,), dtype)

    return (
        Bins(words(num_bins + 4), words(threads // 32)),
        Marks(words(num_words, "uint32"), words(num_words, "uint32")),
        Listed(words(room, "uint32"), words(room), words(1)),
        Few(words(FEW, "uint32"), words(FEW), words(1)),
        Found(*(words(1) for _ in range(5))),
        T.alloc_shared((2, threads // 32), "uint32"),
    )


def registers(loads: int, is_kept: bool) -> tuple[Search, Batch]:
    """What a thread has in registers."""

    def words(size: int, dtype: str = "int32") -> T.Buffer:
        return T.alloc_local((size,), dtype)

    search = Search(*(words(1, "uint32") for _ in range(3)), *(words(1) for _ in range(4)))
    return search, Batch(words(4 * loads, "uint32"), words(1), is_kept)


def _warp_and_lane() -> tuple[Any, Any]:
    thread = T.get_thread_binding()
    return thread // 32, thread % 32


def _sort_key(x: Any) -> Any:
    """The uint32 that sorts like the float32 x: any NaN on top, -0 equal to +0. An expression."""
    # A sum turns any NaN into the one with all bits but the sign set, and -0 + 0 is +0.
    bits = T.reinterpret(T.ieee_add(x, T.float32(0)), "uint32")
    return bits ^ (T.cast(T.reinterpret(bits, "int32") >> 31, "uint32") | T.uint32(0x80000000))


@T.macro
def _bound_of(key: Any) -> Any:
    """The largest float32 whose key is at most a key that is at least that of -∞."""
    bits = T.alloc_var("uint32", init=T.min(key, T.uint32(_INFINITY_KEY)))
    if bits == T.uint32(0x7FFFFFFF):  # would be -0, whose key is that of 0
        bits = T.uint32(0x7FFFFFFE)
    bits = T.if_then_else(bits >= T.uint32(0x80000000), bits ^ T.uint32(0x80000000), ~bits)
    return T.reinterpret(bits, "float32")


def num_bits(x: Any) -> Any:
    """Number of bits that a uint32 takes, int32. An expression."""
    return 32 - count_leading_zeros(x)


def per_load(dtype: str) -> int:
    """Elements of 16 bytes."""
    return 4 if dtype == "float32" else 8


def _bits_of(row: Row, column: Any, is_inside: Any) -> Any:
    """The bits of an element as uint32; those of -∞ if it is not inside. An expression."""
    dtype = row.logits.dtype
    unsigned = "uint32" if dtype == "float32" else "uint16"
    outside = T.uint32(_NEGATIVE_INFINITY[dtype])
    return T.if_then_else(is_inside, T.cast(T.reinterpret(row.logits[row.index, column], unsigned), "uint32"), outside)


@T.macro
def _load(row: Row, span: Span, first: Any, words: T.Buffer, place: Any) -> None:
    """Load the 16 bytes from column `first` on into four words, from index `place` on; -∞ outside of the span."""
    elements = per_load(row.logits.dtype)
    if first >= span.begin and span.end - first >= elements:
        load_16_bytes(T.address_of(row.logits[row.index, first]), T.address_of(words[place]))
    else:
        for i in T.unroll(4):
            words[place + i] = T.uint32(0)
        for i in T.unroll(elements):
            column = first + i
            bits = _bits_of(row, column, column >= span.begin and column < span.end)
            shift = T.cast(i * 4 % elements * 4, "uint32")
            words[place + i * 4 // elements] = words[place + i * 4 // elements] | (bits << shift)


def _value_of(words: T.Buffer, dtype: str, place: Any, i: Any) -> Any:
    """Element i of the 16 bytes in four words from index `place` on, float32. An expression."""
    if dtype == "float32":
        return T.reinterpret(words[place + i], "float32")
    upper = words[place + i // 2] >> T.cast(i % 2 * 16, "uint32")
    return T.reinterpret(upper << T.uint32(16), "float32")


@T.macro
def clear(words: T.Buffer, num_words: Any) -> None:
    """Zero words of shared memory, in fours."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    for j in T.serial(T.ceildiv(num_words, threads * 4)):
        first = (j * threads + thread) * 4
        if first < num_words:
            for v in T.vectorized(4):
                words[first + v] = T.cast(0, words.dtype)


@T.macro
def _bounds(row: Row, column: Any, num_words: Any) -> tuple[Any, Any]:
    begin, end = T.alloc_var("int32", init=T.max(row.start, column)), T.alloc_var("int32", init=row.end)
    # As a sum, the end could overflow; the distance fits 32 bits without a sign.
    if T.cast(row.end, "uint32") - T.cast(column, "uint32") > T.cast(num_words, "uint32") * T.uint32(32):
        end = column + num_words * 32
    if num_words <= 0:
        end = begin
    return begin, end


def span_of(row: Row, column: Any, num_words: Any) -> Span:
    """The words of columns from `column` on."""
    begin, end = _bounds(row, column, num_words)
    return Span(column, begin, end, num_words)


def _batches_of(row: Row, span: Span, batch: Batch) -> Any:
    """Batches that hold a span."""
    elements = per_load(row.logits.dtype)
    return T.ceildiv(span.num_words * (32 // elements), T.get_thread_extent() * (int(batch.words.shape[0]) // 4))


def _place_of(row: Row, batch: Batch, index: Any, load: int) -> Any:
    """The first column of a thread's load of a batch, counted from the span's."""
    thread, threads, loads = T.get_thread_binding(), T.get_thread_extent(), int(batch.words.shape[0]) // 4
    return ((index * loads + load) * threads + thread) * per_load(row.logits.dtype)


@T.macro
def load_first(row: Row, span: Span, batch: Batch) -> None:
    """Load a span's first batch."""
    batch.index[0] = 0
    for u in T.unroll(int(batch.words.shape[0]) // 4):
        _load(row, span, span.column + _place_of(row, batch, 0, u), batch.words, 4 * u)


@T.macro
def sample(row: Row, span: Span, k: Any, extremes: T.Buffer, batch: Batch, search: Search, num_bins: int) -> None:
    """Choose the bins by some elements of each thread, spread over the whole window, `span`.

    They are from `batch`, if it has the whole window, or else a load. Groups of as many elements as hold one or two
    winners on average have maxima of which the least is hardly above the k-th best. It becomes `low`. Where such a
    group is smaller than a thread's elements, the least element of the sample does. Bins reach at least as far above
    the largest of the sample as that is above `low`.
    """
    thread, threads, (warp, lane) = T.get_thread_binding(), T.get_thread_extent(), _warp_and_lane()
    dtype, warps, elements = row.logits.dtype, threads // 32, per_load(row.logits.dtype)
    sampled = 8 if batch.is_all else elements
    key, least, most, group, other, low = (T.alloc_var("uint32") for _ in range(6))
    length = row.end - row.start
    least, most = T.uint32(_TOP_KEY), T.uint32(0)
    words = T.alloc_local((4,), "uint32")
    if not batch.is_all:
        spread = T.max(span.num_words * (32 // elements) // threads, 1)
        _load(row, span, span.column + thread * spread * elements, words, 0)
    for i in T.unroll(sampled):
        if batch.is_all:
            loads = int(batch.words.shape[0]) // 4
            key = _sort_key(_value_of(batch.words, dtype, i * loads // 8 * 4, i % elements))
        else:
            key = _sort_key(_value_of(words, dtype, 0, i))
        if key >= T.uint32(LEAST_KEY):
            least, most = T.min(least, key), T.max(most, key)
    group = most
    for step in T.unroll(5):
        # Two winners a group on average: of 64 groups all have one in 0.9999 of all rows.
        size = T.if_then_else(threads >> (step + 1) >= 64, sampled << step, sampled << (step + 1))
        other = T.shfl_xor(group, 1 << step)
        if size * k <= length:
            group = T.max(group, other)
    if sampled // 2 * k > length or group == T.uint32(0):
        group = least
    low, most = T.warp_reduce_min(group), T.warp_reduce_max(most)
    if lane == 0:
        extremes[0, warp] = low
        extremes[1, warp] = most
    T.sync_threads()
    low, most = T.uint32(_TOP_KEY), T.uint32(0)
    if lane < warps:
        low, most = extremes[0, lane], extremes[1, lane]
    low, most = T.warp_reduce_min(low), T.warp_reduce_max(most)
    # All candidates win, or none was seen.
    if k >= length or low == T.uint32(_TOP_KEY):
        low = T.uint32(LEAST_KEY)
    search.low[0] = low
    search.width[0] = T.uint32(_TOP_KEY) - low
    most = T.if_then_else(most >= low, most - low, search.width[0])
    # At most so that the bins reach over all keys.
    bits = num_bins.bit_length() - 1
    search.shift[0] = T.cast(T.min(T.max(num_bits(most) - bits + 1, 0), 32 - bits), "uint32")


@T.macro
def search_all(search: Search, k: Any) -> None:
    """Begin a search of `k` keys among all."""
    search.low[0], search.width[0] = T.uint32(0), T.uint32(0)
    search.need[0], search.count[0], search.above[0], search.within[0] = k, 0, 0, 0


@T.macro
def _count_key(key: Any, search: Search, bins: Bins) -> None:
    """Count a key by its bin if it is in the range, or else in front of the bins: nvcc would make branches."""
    num_bins, below = int(bins.counts.shape[0]) - _PAD, T.uint32(1) << search.shift[0]
    offset = T.alloc_var("uint32", init=key - (search.low[0] - below))
    place = T.min(offset >> search.shift[0], T.uint32(num_bins))
    place = T.if_then_else(offset <= search.width[0] + below, place, T.uint32(0))
    T.atomic_add(bins.counts[T.cast(place, "int32")], 1)


@T.macro
def count_row(row: Row, span: Span, batch: Batch, search: Search, bins: Bins) -> None:
    """Count the candidates of a span that are in the range by bins."""
    words, elements, loads = batch.words, per_load(row.logits.dtype), int(batch.words.shape[0]) // 4
    last, following = T.alloc_var("int32"), T.alloc_var("int32")
    last = 0 if batch.is_all else _batches_of(row, span, batch) - 1
    # A pass begins with the batch that is there, the first or the last.
    forward = T.alloc_var("bool", init=batch.index[0] == 0)
    for turn in T.serial(last + 1):
        following = batch.index[0] + T.if_then_else(forward, 1, -1)
        for u in T.unroll(loads):
            for i in T.unroll(elements):
                _count_key(_sort_key(_value_of(words, row.logits.dtype, 4 * u, i)), search, bins)
            # Loads of the following batch are on their way while the rest of this one is counted.
            if turn < last:
                _load(row, span, span.column + _place_of(row, batch, following, u), words, 4 * u)
        if turn < last:
            batch.index[0] = following


@T.macro
def count_listed(listed: Listed, search: Search, bins: Bins) -> None:
    """Count the listed candidates that are in the range by bins."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    for j in T.serial(T.ceildiv(listed.count[0], threads)):
        if j * threads + thread < listed.count[0]:
            _count_key(listed.keys[j * threads + thread], search, bins)


@T.macro
def sum_groups(bins: Bins) -> None:
    """Sum the bins of each warp's threads."""
    thread, (warp, lane) = T.get_thread_binding(), _warp_and_lane()
    num_bins = int(bins.counts.shape[0]) - _PAD
    per_thread = num_bins // T.get_thread_extent()
    total = T.alloc_var("int32", init=0)
    for j in T.unroll(per_thread):
        total = total + bins.counts[num_bins - thread * per_thread - j]
    total = T.warp_reduce_sum(total)
    if lane == 0:
        bins.groups[warp] = total


@T.macro
def _load_sums(address: Any, rank: Any, cluster_size: int, count: T.Buffer, before: T.Buffer, j: int) -> None:
    """Sum what is at an address in all blocks of the cluster into count[j], in those before this one into before[j]."""
    value = T.alloc_var("int32")
    count[j], before[j] = 0, 0
    for there in T.unroll(cluster_size, unroll_factor=8):  # all of 16 at once take too many registers
        value = load_from_cluster(address, there)
        count[j] = count[j] + value
        before[j] = before[j] + T.if_then_else(there < rank, value, 0)


@T.macro
def _scan_warp(sums: T.Buffer) -> None:
    """Inclusive prefix sums over the lanes of a warp, int32 (2), in place."""
    lane = T.get_thread_binding() % 32
    for step in T.unroll(5):
        for i in T.unroll(2):
            lower = T.shfl_up(sums[i], 1 << step)
            sums[i] = sums[i] + T.if_then_else(lane >= (1 << step), lower, 0)


@T.macro
def find(bins: Bins, cluster_size: int, rank: Any, search: Search, found: Found) -> None:
    """Find the bin, counted over all blocks of the cluster, that holds the last of the needed candidates.

    One warp finds the group of bins, and then the bin in it: it reads few words of the other blocks.
    """
    warp, lane = _warp_and_lane()
    threads = T.get_thread_extent()
    num_bins = int(bins.counts.shape[0]) - _PAD
    warps, per_lane = threads // 32, num_bins // threads
    count, before = (T.alloc_local((per_lane,), "int32") for _ in range(2))
    sums = T.alloc_local((2,), "int32")
    group, above, before_above = (T.alloc_var("int32") for _ in range(3))
    if warp == 0:
        count[0], before[0] = 0, 0
        if lane < warps:
            if cluster_size > 1:
                _load_sums(T.address_of(bins.groups[lane]), rank, cluster_size, count, before, 0)
            else:
                count[0] = bins.groups[lane]
        sums[0], sums[1] = count[0], before[0]
        _scan_warp(sums)
        if lane == 31 and sums[0] < search.need[0]:
            found.bin[0] = -1
            found.above[0] = sums[0]
            found.before_above[0] = sums[1]
        # The first lane whose sum is enough; 32 if there is none.
        group = T.cast(T.popcount(T.cast(T.ballot(sums[0] < search.need[0]), "uint32")), "int32")
        above = T.shfl_sync(sums[0] - count[0], group % 32)
        before_above = T.shfl_sync(sums[1] - before[0], group % 32)
        if group < 32:
            sums[0], sums[1] = 0, 0
            for j in T.unroll(per_lane):
                place = num_bins - (group * 32 + lane) * per_lane - j
                if cluster_size > 1:
                    _load_sums(T.address_of(bins.counts[place]), rank, cluster_size, count, before, j)
                else:
                    count[j], before[j] = bins.counts[place], 0
                sums[0] = sums[0] + count[j]
                sums[1] = sums[1] + before[j]
            above, before_above = above - sums[0], before_above - sums[1]
            _scan_warp(sums)
            above, before_above = above + sums[0], before_above + sums[1]
            for j in T.unroll(per_lane):
                if above < search.need[0] and search.need[0] <= above + count[j]:
                    found.bin[0] = num_bins - 1 - (group * 32 + lane) * per_lane - j
                    found.above[0] = above
                    found.count[0] = count[j]
                    found.before_above[0] = before_above
                    found.before_count[0] = before[j]
                above, before_above = above + count[j], before_above + before[j]


@T.macro
def narrow(found: Found, k: Any, search: Search, num_bins: int) -> Any:
    """Make the bin that was found the range; return whether the search goes on.

    It is over when all of the range wins, or when all keys of the range are equal.
    """
    below, goes_on = T.alloc_var("uint32"), T.alloc_var("bool")
    search.above[0] = search.above[0] + found.before_above[0]
    if found.bin[0] >= 0:
        below = T.cast(found.bin[0], "uint32") << search.shift[0]
        search.width[0] = search.width[0] - below
        if found.bin[0] < num_bins - 1:
            search.width[0] = T.min(search.width[0], (T.uint32(1) << search.shift[0]) - T.uint32(1))
        search.low[0] = search.low[0] + below
        search.need[0] = search.need[0] - found.above[0]
        search.count[0] = found.count[0]
        search.within[0] = found.before_count[0]
        goes_on = search.count[0] != search.need[0] and search.width[0] != T.uint32(0)
    elif search.low[0] != T.uint32(LEAST_KEY):
        # The sample's bins were too high: the range is now all that is below them.
        search.width[0] = search.low[0] - T.uint32(LEAST_KEY + 1)
        search.low[0] = T.uint32(LEAST_KEY)
        search.need[0] = search.need[0] - found.above[0]
        search.count[0] = _UNKNOWN
        goes_on = True
    else:
        # Fewer candidates than k: all win.
        search.width[0] = T.uint32(_TOP_KEY - LEAST_KEY)
        search.need[0] = k
        search.within[0] = search.above[0]
        search.above[0] = 0
        goes_on = False
    search.shift[0] = T.cast(T.max(num_bits(search.width[0]) - (num_bins.bit_length() - 1), 0), "uint32")
    return goes_on


@T.macro
def gather_few(listed: Listed, cluster_size: int, rank: Any, few: Few) -> None:
    """Gather what all blocks of the cluster have listed, at most FEW, one warp for each block."""
    warp, lane = _warp_and_lane()
    count, slot = T.alloc_var("int32"), T.alloc_var("int32")
    for j in T.serial(T.ceildiv(cluster_size, T.get_thread_extent() // 32)):
        there = j * (T.get_thread_extent() // 32) + warp
        if there < cluster_size:
            count = load_from_cluster(T.address_of(listed.count[0]), there)
            for i in T.unroll(FEW // 32):
                if i * 32 + lane < count:
                    slot = builtin("int32", "atomicAdd", T.address_of(few.count[0]), 1)
                    few.keys[slot] = T.cast(
                        load_from_cluster(T.address_of(listed.keys[i * 32 + lane]), there), "uint32"
                    )
                    few.is_before[slot] = T.if_then_else(there < rank, 1, 0)


@T.macro
def rank_few(keys: T.Buffer, is_before: Any, search: Search, found: Found) -> None:
    """Find the key of the last of the needed candidates among at most FEW in any order; it becomes the range.

    Each is compared with all others, which takes less than to count them by bins.
    """
    thread = T.get_thread_binding()
    above, equal, ahead, before_above, before_equal = (T.alloc_var("int32") for _ in range(5))
    key, other = T.alloc_var("uint32"), T.alloc_var("uint32")
    if thread < search.count[0]:
        above, equal, ahead, before_above, before_equal = 0, 0, 0, 0, 0
        key = keys[thread]
        for i in T.serial(search.count[0]):
            other = keys[i]
            above = above + T.if_then_else(other > key, 1, 0)
            ahead = ahead + T.if_then_else(other == key and i < thread, 1, 0)
            equal = equal + T.if_then_else(other == key, 1, 0)
            if is_before is not None:
                before_above = before_above + T.if_then_else(other > key, is_before[i], 0)
                before_equal = before_equal + T.if_then_else(other == key, is_before[i], 0)
        if above + ahead == search.need[0] - 1:
            found.bin[0] = T.reinterpret(key, "int32")
            found.above[0] = above
            found.count[0] = equal
            found.before_above[0] = before_above
            found.before_count[0] = before_equal
    T.sync_threads()
    search.low[0] = T.reinterpret(found.bin[0], "uint32")
    search.width[0] = T.uint32(0)
    search.need[0] = search.need[0] - found.above[0]
    search.count[0] = found.count[0]
    search.above[0] = search.above[0] + found.before_above[0]
    search.within[0] = found.before_count[0]


@T.macro
def mark_row(
    row: Row, span: Span, batch: Batch, search: Search, marks: Marks, is_marked: Any, listed: "Listed | None"
) -> None:
    """Mark the candidates of a span; with `listed`, list those in the range instead, and mark others if `is_marked`."""
    words, elements, loads = batch.words, per_load(row.logits.dtype), int(batch.words.shape[0]) // 4
    above, within, some_above, high = (T.alloc_var("uint32") for _ in range(4))
    last, following, place, slot = (T.alloc_var("int32") for _ in range(4))
    last = 0 if batch.is_all else _batches_of(row, span, batch) - 1
    forward = T.alloc_var("bool", init=batch.index[0] == 0)
    high = search.low[0] + search.width[0]
    # Comparisons of floats take fewer instructions than keys; all NaN are in the range if its end is the last key.
    least, most = T.alloc_var("float32"), T.alloc_var("float32")
    least, most = _bound_of(search.low[0] - T.uint32(1)), _bound_of(high)
    some_above = T.if_then_else(high == T.uint32(_TOP_KEY), T.uint32(0), T.uint32(_TOP_KEY))
    for turn in T.serial(last + 1):
        following = batch.index[0] + T.if_then_else(forward, 1, -1)
        for u in T.unroll(loads):
            place = _place_of(row, batch, batch.index[0], u)
            above, within = T.uint32(0), T.uint32(0)
            for i in T.unroll(elements):
                above = above | (is_above(_value_of(words, row.logits.dtype, 4 * u, i), most) << T.uint32(i))
                within = within | (is_above(_value_of(words, row.logits.dtype, 4 * u, i), least) << T.uint32(i))
            above = above & some_above
            within = within ^ above
            if above != T.uint32(0) and is_marked:
                atomic_or_u32(T.address_of(marks.above[place // 32]), above << T.cast(place % 32, "uint32"))
            if within != T.uint32(0):
                if listed is None:
                    atomic_or_u32(T.address_of(marks.within[place // 32]), within << T.cast(place % 32, "uint32"))
                else:
                    slot = builtin("int32", "atomicAdd", T.address_of(listed.count[0]), T.popcount(within))
                    for i in T.unroll(elements):
                        if (within >> T.uint32(i)) & T.uint32(1) != T.uint32(0):
                            listed.keys[slot] = _sort_key(_value_of(words, row.logits.dtype, 4 * u, i))
                            listed.places[slot] = place + i
                            slot = slot + 1
            if turn < last:
                _load(row, span, span.column + _place_of(row, batch, following, u), words, 4 * u)
        if turn < last:
            batch.index[0] = following


@T.macro
def mark_listed(listed: Listed, search: Search, marks: Marks) -> None:
    """Mark the listed candidates: above or in the range, which has become smaller since they were listed."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    key, bit, high = (T.alloc_var("uint32") for _ in range(3))
    place = T.alloc_var("int32")
    high = search.low[0] + search.width[0]
    for j in T.serial(T.ceildiv(listed.count[0], threads)):
        if j * threads + thread < listed.count[0]:
            key, place = listed.keys[j * threads + thread], listed.places[j * threads + thread]
            bit = T.uint32(1) << T.cast(place % 32, "uint32")
            if key > high:
                atomic_or_u32(T.address_of(marks.above[place // 32]), bit)
            elif key >= search.low[0]:
                atomic_or_u32(T.address_of(marks.within[place // 32]), bit)


@T.macro
def emit(marks: Marks, span: Span, need: Any, first: Any, before: T.Buffer, winners: T.Buffer) -> None:
    """Append the span's winners, as columns in ascending order, to `winners`, whose first is the row's `first`-th.

    before: int32 (2,), the number of marks, above and within, in front of the span; here those of the span are added.
    """
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    per_thread = T.ceildiv(span.num_words, threads)
    sums, all_sums = (T.alloc_local((2,), "int32") for _ in range(2))
    own_above, own_within, word, slot = (T.alloc_var("int32") for _ in range(4))
    bits, bit = T.alloc_var("uint32"), T.alloc_var("uint32")
    for i in T.unroll(2):
        sums[i] = 0
    for j in T.serial(per_thread):
        word = thread * per_thread + j
        if word < span.num_words:
            sums[0] = sums[0] + T.cast(T.popcount(marks.above[word]), "int32")
            sums[1] = sums[1] + T.cast(T.popcount(marks.within[word]), "int32")
    own_above, own_within = sums[0], sums[1]
    scan_two(sums, all_sums)
    own_within = before[1] + sums[1] - own_within  # from now on the number of such marks so far
    slot = before[0] + sums[0] - own_above + T.min(own_within, need) - first
    for j in T.serial(per_thread):
        word = thread * per_thread + j
        if word < span.num_words:
            bits = marks.within[word]
            own_above = T.cast(T.popcount(bits), "int32")
            for _ in T.serial(
                T.min(T.max(own_within + own_above - need, 0), own_above)
            ):  # too many: the last do not win
                bits = bits ^ (T.uint32(1) << T.cast(num_bits(bits) - 1, "uint32"))
            own_within = own_within + own_above
            bits = bits | marks.above[word]
            while bits != T.uint32(0):
                bit = bits & (~bits + T.uint32(1))
                bits = bits ^ bit
                winners[slot] = span.column + word * 32 + num_bits(bit) - 1
                slot = slot + 1
    for i in T.unroll(2):
        before[i] = before[i] + all_sums[i]


class Results(NamedTuple):
    """Where winners are written, and how; `given` says which tensors there are."""

    raw_out: T.Buffer
    out: T.Buffer
    counts: T.Buffer
    offsets: T.Buffer
    block_table: T.Buffer
    given: Any
    block_size: Any


@T.macro
def write_winners(to: Results, index: Any, batch: Any, start: Any, winners: T.Buffer, first: Any, end: Any) -> None:
    """Write winners, columns in ascending order, to the places `first` to `end` of the row: as they are and mapped."""
    thread = T.get_thread_binding()
    threads = T.get_thread_extent()
    entry, value, page, page_block = (T.alloc_var("int32") for _ in range(4))
    for j in T.serial(T.ceildiv(end - first, threads)):
        entry = j * threads + thread
        if first + entry < end:
            value = winners[entry] - start
            if to.given & RAW_OUT:
                to.raw_out[index, first + entry] = value
            if to.given & OFFSETS:
                value = value + to.offsets[index]
            if to.given & BLOCK_TABLE:
                page = T.truncdiv(value, to.block_size)
                page_block = -1
                if page < to.block_table.shape[1]:
                    page_block = to.block_table[batch, page]
                position = T.cast(page_block, "int64") * to.block_size + (value - page * to.block_size)
                value = T.if_then_else(page_block >= 0 and position < 2**31, T.cast(position, "int32"), -1)
            to.out[index, first + entry] = value


@T.macro
def write_rest(to: Results, index: Any, end: Any, k: Any) -> None:
    """Write -1 behind a row's winners, and their number."""
    thread = T.get_thread_binding()
    threads = T.get_thread_extent()
    entry = T.alloc_var("int32")
    for j in T.serial(T.ceildiv(k - end, threads)):
        entry = end + j * threads + thread
        if entry < k:
            to.out[index, entry] = -1
            if to.given & RAW_OUT:
                to.raw_out[index, entry] = -1
    if thread == 0:
        to.counts[index] = end
