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
from tk_indexer.device.row_words import load_16_bytes
from tk_indexer.selection.topk_indices import NUM_BINS

_BIN_BITS = NUM_BINS.bit_length() - 1
LEAST_KEY = 0x00800000
"""The least key of a candidate, one above the key of -∞."""
_TOP_KEY = 0xFFFFFFFF
_NEGATIVE_INFINITY = {"float32": 0xFF800000, "bfloat16": 0xFF80}
_ELEMENTS = 16
"""Elements that a thread loads at a time."""


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


class Search(NamedTuple):
    """Keys among which the threshold is searched: from `low` to low + width. All are uint32 or int32 (1,) in registers.

    Candidates with larger keys are winners, and `need` more are wanted from the range.
    """

    low: Any
    width: Any
    shift: Any  # bin of a key: (key - low) >> shift, at most the last one
    need: Any
    above: Any  # the block's own number of candidates above the range
    within: Any  # and in it


class Found(NamedTuple):
    """The bin in which the count from the top reaches the number that is needed; int32 (1,) in shared memory."""

    bin: Any  # -1 if all bins together have fewer
    above: Any  # count in the bins above it, or in all
    count: Any  # count in it
    own_above: Any  # the same of this block's own columns
    own_count: Any


class Marks(NamedTuple):
    """A bit for each column of a span; uint32 (num_words) in shared memory."""

    above: Any  # winners: their keys are above the range
    within: Any  # keys in the range, of which the first `need` win


class Listed(NamedTuple):
    """Candidates of the range in no order, in shared memory."""

    keys: Any  # uint32
    places: Any  # int32: column, counted from the column of bit 0 of the block's first word
    count: Any  # int32 (1,)


def _warp_and_lane() -> tuple[Any, Any]:
    thread = T.get_thread_binding()
    return thread // 32, thread % 32


def _sort_key(x: Any) -> Any:
    """The uint32 that sorts like the float32 x: any NaN on top, -0 equal to +0. An expression."""
    # A sum turns any NaN into the one with all bits but the sign set, and -0 + 0 is +0.
    bits = T.reinterpret(T.ieee_add(x, T.float32(0)), "uint32")
    return bits ^ (T.cast(T.reinterpret(bits, "int32") >> 31, "uint32") | T.uint32(0x80000000))


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
def clear(words: T.Buffer) -> None:
    """Zero the words of shared memory, a multiple of 4."""
    thread, threads, num_words = T.get_thread_binding(), T.get_thread_extent(), words.shape[0]
    for j in T.unroll(T.ceildiv(num_words, threads * 4)):
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


@T.macro
def sample(row: Row, span: Span, k: Any, extremes: T.Buffer, search: Search) -> None:
    """Choose the bins by one load of each thread, spread over the whole window, `span`.

    Groups of as many elements as hold one winner on average have maxima of which the least is hardly above the k-th
    best. It becomes `low`. Where such a group is smaller than a load, the least element of the sample does. Bins reach
    at least as far above the largest of the sample as that is above `low`.
    """
    thread, threads, (warp, lane) = T.get_thread_binding(), T.get_thread_extent(), _warp_and_lane()
    warps, elements = threads // 32, per_load(row.logits.dtype)
    words = T.alloc_local((4,), "uint32")
    key, least, most, group, other, low = (T.alloc_var("uint32") for _ in range(6))
    spread = T.max(span.num_words * (32 // elements) // threads, 1)
    length = row.end - row.start
    _load(row, span, span.column + thread * spread * elements, words, 0)
    least, most = T.uint32(_TOP_KEY), T.uint32(0)
    for i in T.unroll(elements):
        key = _sort_key(_value_of(words, row.logits.dtype, 0, i))
        if key >= T.uint32(LEAST_KEY):
            least, most = T.min(least, key), T.max(most, key)
    group = most
    for step in T.unroll(5):
        other = T.shfl_xor(group, 1 << step)
        if (elements << (step + 1)) * k <= length:
            group = T.max(group, other)
    if elements * k > length or group == T.uint32(0):
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
    search.shift[0] = T.cast(T.max(num_bits(most) - _BIN_BITS + 1, 0), "uint32")


@T.macro
def _count_key(key: Any, search: Search, bins: T.Buffer) -> None:
    offset = T.alloc_var("uint32", init=key - search.low[0])
    if offset <= search.width[0]:
        T.atomic_add(bins[T.cast(T.min(offset >> search.shift[0], T.uint32(NUM_BINS - 1)), "int32")], 1)


@T.macro
def count_row(row: Row, span: Span, search: Search, bins: T.Buffer) -> None:
    """Count the candidates of a span that are in the range by bins."""
    thread, threads, elements = T.get_thread_binding(), T.get_thread_extent(), per_load(row.logits.dtype)
    loads = _ELEMENTS // elements
    words = T.alloc_local((4 * loads,), "uint32")
    for batch in T.serial(T.ceildiv(span.num_words * (32 // elements), threads * loads)):
        for u in T.unroll(loads):
            _load(row, span, span.column + ((batch * loads + u) * threads + thread) * elements, words, 4 * u)
        for u in T.unroll(loads):
            for i in T.unroll(elements):
                _count_key(_sort_key(_value_of(words, row.logits.dtype, 4 * u, i)), search, bins)


@T.macro
def count_listed(listed: Listed, search: Search, bins: T.Buffer) -> None:
    """Count the listed candidates that are in the range by bins."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    for j in T.serial(T.ceildiv(listed.count[0], threads)):
        if j * threads + thread < listed.count[0]:
            _count_key(listed.keys[j * threads + thread], search, bins)


@T.macro
def find(bins: T.Buffer, cluster_size: int, search: Search, found: Found) -> None:
    """Find the bin, counted over all blocks of the cluster, that holds the last of the needed candidates."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    per_thread = NUM_BINS // threads
    counts, own = (T.alloc_local((per_thread,), "int32") for _ in range(2))
    sums, all_sums = (T.alloc_local((2,), "int32") for _ in range(2))
    above, own_above = T.alloc_var("int32"), T.alloc_var("int32")
    top = NUM_BINS - 1 - thread * per_thread  # the thread's bins go down from here
    for j in T.unroll(per_thread):
        own[j] = bins[top - j]
        counts[j] = own[j]
    if cluster_size > 1:
        for j in T.unroll(per_thread):
            counts[j] = 0
            for rank in T.unroll(cluster_size):
                counts[j] = counts[j] + load_from_cluster(T.address_of(bins[top - j]), rank)
    for i in T.unroll(2):
        sums[i] = 0
    for j in T.unroll(per_thread):
        sums[0] = sums[0] + counts[j]
        sums[1] = sums[1] + own[j]
    above, own_above = sums[0], sums[1]
    scan_two(sums, all_sums)
    above, own_above = sums[0] - above, sums[1] - own_above
    if thread == 0 and all_sums[0] < search.need[0]:
        found.bin[0] = -1
        found.above[0] = all_sums[0]
        found.own_above[0] = all_sums[1]
    for j in T.unroll(per_thread):
        if above < search.need[0] and search.need[0] <= above + counts[j]:
            found.bin[0] = top - j
            found.above[0] = above
            found.count[0] = counts[j]
            found.own_above[0] = own_above
            found.own_count[0] = own[j]
        above, own_above = above + counts[j], own_above + own[j]


@T.macro
def narrow(found: Found, k: Any, search: Search) -> Any:
    """Make the bin that was found the range; return whether the search goes on.

    It is over when all of the range wins, or when all keys of the range are equal.
    """
    below, goes_on = T.alloc_var("uint32"), T.alloc_var("bool")
    search.above[0] = search.above[0] + found.own_above[0]
    if found.bin[0] >= 0:
        below = T.cast(found.bin[0], "uint32") << search.shift[0]
        search.width[0] = search.width[0] - below
        if found.bin[0] < NUM_BINS - 1:
            search.width[0] = T.min(search.width[0], (T.uint32(1) << search.shift[0]) - T.uint32(1))
        search.low[0] = search.low[0] + below
        search.need[0] = search.need[0] - found.above[0]
        search.within[0] = found.own_count[0]
        goes_on = found.count[0] != search.need[0] and search.width[0] != T.uint32(0)
    elif search.low[0] != T.uint32(LEAST_KEY):
        # The sample's bins were too high: the range is now all that is below them.
        search.width[0] = search.low[0] - T.uint32(LEAST_KEY + 1)
        search.low[0] = T.uint32(LEAST_KEY)
        search.need[0] = search.need[0] - found.above[0]
        goes_on = True
    else:
        # Fewer candidates than k: all win.
        search.width[0] = T.uint32(_TOP_KEY - LEAST_KEY)
        search.need[0] = k
        search.within[0] = search.above[0]
        search.above[0] = 0
        goes_on = False
    search.shift[0] = T.cast(T.max(num_bits(search.width[0]) - _BIN_BITS, 0), "uint32")
    return goes_on


@T.macro
def mark_row(row: Row, span: Span, search: Search, marks: Marks, is_marked: Any, listed: Any) -> None:
    """Mark the candidates of a span; with `listed`, list those in the range instead, and mark others if `is_marked`."""
    thread, threads, elements = T.get_thread_binding(), T.get_thread_extent(), per_load(row.logits.dtype)
    loads = _ELEMENTS // elements
    words = T.alloc_local((4 * loads,), "uint32")
    keys = T.alloc_local((elements,), "uint32")
    above, within, high = (T.alloc_var("uint32") for _ in range(3))
    place, slot = T.alloc_var("int32"), T.alloc_var("int32")
    high = search.low[0] + search.width[0]
    for batch in T.serial(T.ceildiv(span.num_words * (32 // elements), threads * loads)):
        for u in T.unroll(loads):
            _load(row, span, span.column + ((batch * loads + u) * threads + thread) * elements, words, 4 * u)
        for u in T.unroll(loads):
            place = ((batch * loads + u) * threads + thread) * elements
            above, within = T.uint32(0), T.uint32(0)
            for i in T.unroll(elements):
                keys[i] = _sort_key(_value_of(words, row.logits.dtype, 4 * u, i))
                above = above | T.if_then_else(keys[i] > high, T.uint32(1 << i), T.uint32(0))
                within = within | T.if_then_else(keys[i] >= search.low[0], T.uint32(1 << i), T.uint32(0))
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
                            listed.keys[slot] = keys[i]
                            listed.places[slot] = place + i
                            slot = slot + 1


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
            bits = marks.above[word]
            if own_within < need:
                bits = bits | marks.within[word]
            while bits != T.uint32(0):
                bit = bits & (~bits + T.uint32(1))
                bits = bits ^ bit
                if marks.within[word] & bit == T.uint32(0):
                    winners[slot] = span.column + word * 32 + num_bits(bit) - 1
                    slot = slot + 1
                elif own_within < need:
                    winners[slot] = span.column + word * 32 + num_bits(bit) - 1
                    slot = slot + 1
                    own_within = own_within + 1
    for i in T.unroll(2):
        before[i] = before[i] + all_sums[i]
