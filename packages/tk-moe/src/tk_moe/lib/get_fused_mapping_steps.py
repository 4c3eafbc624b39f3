"""The steps of get_fused_mapping's kernels; mapping/get_fused_mapping.py has the picture.

A pair is a token with one of its experts. Work that a block does once per expert is done by thread e for expert e. A
value loaded in a branch is kept in a variable (T.alloc_var): TileLang would repeat the load wherever its name is used.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from tk_core.device.bits import atomic_or_u32
from tk_core.macros.block_scan import scan_two
from tk_core.math import ceil_div
from tk_moe.device.async_copy import send_to_cluster

EXPERT_BITS = 10  # for at most 1024 experts
PAIR_BITS = 16  # for the index of a pair in its thread block's part


class Run(NamedTuple):
    """The consecutive pairs that a warp ranks and sorts; indices of pairs count from the first of the block's part."""

    begin: Any  # first pair of the part
    first: Any  # index of the run's first pair
    end: Any  # index behind its last pair, at most `first` if there is none
    items: Any  # of each pair of the part: its rank among those of its expert in the run << EXPERT_BITS | expert, or -1
    ranks: Any  # (warps, num_experts): number of pairs in each run, later the number in the runs before it


class Experts(NamedTuple):
    """Where each expert's pairs and padding are; int32 (num_experts) in shared memory."""

    first_sorted: Any  # index of the expert's first pair among the block's sorted ones
    first_pos: Any  # position of that pair
    padding_start: Any  # position behind the pairs of all blocks
    padding_end: Any  # position behind the segment


class Maps(NamedTuple):
    """The op's outputs by position, int32 (num_pos)."""

    pos_to_expert: Any
    pos_to_token: Any
    pos_to_token_topk: Any


class Segments(NamedTuple):
    """The op's outputs by expert, int32 (num_experts); `psum`, where the pairs end, may be None."""

    start: Any
    end: Any
    size: Any
    psum: Any


def _warp_and_lane() -> tuple[Any, Any]:
    thread = T.get_thread_binding()
    return thread // 32, thread % 32


@T.macro
def clear(words: T.Buffer) -> None:
    """Zero uint32 words of shared memory, a multiple of 4."""
    thread, threads, num_words = T.get_thread_binding(), T.get_thread_extent(), words.shape[0]
    for j in T.unroll(ceil_div(num_words, threads * 4)):
        first = (j * threads + thread) * 4
        if first < num_words:
            for v in T.vectorized(4):
                words[first + v] = T.uint32(0)


@T.macro
def count_pairs(pairs: T.Buffer, begin: Any, size: Any, split: Any, counts: T.Buffer, loads: int) -> None:
    """Count `size` pairs from `begin` on by expert: the first `split` of them into counts[0], the rest into counts[1].

    Each thread has `loads` loads in flight.
    """
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    indices = T.alloc_local((loads,), pairs.dtype)
    half = T.alloc_var("int32")
    for batch in T.serial(T.ceildiv(size, threads * loads)):
        for u in T.unroll(loads):
            index = (batch * loads + u) * threads + thread
            indices[u] = T.cast(-1, pairs.dtype)
            if index < size:
                indices[u] = pairs[begin + index]
        for u in T.unroll(loads):
            if indices[u] >= 0 and indices[u] < counts.shape[1]:
                half = T.if_then_else((batch * loads + u) * threads + thread < split, 0, 1)
                T.atomic_add(counts[half, T.cast(indices[u], "int32")], 1)


@T.macro
def add_block_counts(block_counts: T.Buffer, counts: T.Buffer) -> None:
    """Add the first launch's counts: of the thread blocks before this one to counts[0], of the others to counts[1]."""
    thread, threads, block = T.get_thread_binding(), T.get_thread_extent(), T.get_block_binding()
    num_blocks, num_experts = block_counts.shape
    groups = threads // num_experts  # so many threads serve an expert
    group, expert = thread // num_experts, thread % num_experts
    if group < groups:
        before, total, count = (T.alloc_var("int32", init=0) for _ in range(3))
        for i in T.serial(T.ceildiv(num_blocks - group, groups)):
            count = block_counts[i * groups + group, expert]
            total = total + count
            before = before + T.if_then_else(i * groups + group < block, count, 0)
        T.atomic_add(counts[0, expert], before)
        T.atomic_add(counts[1, expert], total - before)


@T.macro
def send_counts(counts: T.Buffer, received: T.Buffer, arrived: T.Buffer, rank: Any) -> None:
    """Send the block's counts to the blocks of its cluster: warp b to block b, whose mbarrier counts the bytes."""
    thread, (warp, lane) = T.get_thread_binding(), _warp_and_lane()
    cluster_size, row = received.shape
    sent = T.alloc_shared((row,), "uint16")
    if thread < counts.shape[1]:
        sent[thread] = T.cast(counts[0, thread] + counts[1, thread], "uint16")
    T.sync_threads()
    T.cluster_wait()  # until all blocks have started and their shared memory can be written
    if warp < cluster_size:
        for j in T.unroll(ceil_div(row, 256)):
            first = (j * 32 + lane) * 8
            if first < row:
                source, destination = T.access_ptr(sent[first], "r"), T.access_ptr(received[rank, first], "w")
                send_to_cluster(destination, source, T.access_ptr(arrived[0], "rw"), warp)


@T.macro
def rank_run(pairs: T.Buffer, run: Run, masks: Any, loads: int) -> None:
    """Rank the pairs of each warp's run among those of the same expert, into run.items, and count them, in run.ranks.

    Lanes with equal experts find each other by bits in `masks`, uint32 (warps, num_experts), or, where that is None, by
    a match instruction, which occupies the whole SM for 2 cycles per distinct expert.
    """
    warp, lane = _warp_and_lane()
    indices = T.alloc_local((loads,), pairs.dtype)
    expert, before, lower = (T.alloc_var("int32") for _ in range(3))
    equals = T.alloc_var("uint32")
    bit = T.uint32(1) << T.cast(lane, "uint32")
    rounds = T.ceildiv(run.end - run.first, 32)
    for batch in T.serial(T.ceildiv(rounds, loads)):
        first = run.first + batch * loads * 32
        for u in T.unroll(loads):
            indices[u] = T.cast(-1, pairs.dtype)
            if first + u * 32 + lane < run.end:
                indices[u] = pairs[run.begin + first + u * 32 + lane]
        for u in T.unroll(loads):
            if batch * loads + u < rounds:  # uniform in a warp
                is_expert = T.And(indices[u] >= 0, indices[u] < run.ranks.shape[1])
                expert = T.if_then_else(is_expert, T.cast(indices[u], "int32"), -1)
                if masks is None:
                    equals = T.match_any_sync(expert)
                else:
                    equals = T.uint32(0)
                    if expert >= 0:
                        atomic_or_u32(T.access_ptr(masks[warp, expert], "rw"), bit)
                    T.sync_warp()
                    if expert >= 0:
                        equals = masks[warp, expert]
                lower = T.cast(T.popcount(equals & (bit - T.uint32(1))), "int32")
                before = 0
                if expert >= 0:
                    before = T.cast(run.ranks[warp, expert], "int32")
                T.sync_warp()
                if expert >= 0 and lower == 0:
                    run.ranks[warp, expert] = T.cast(before + T.cast(T.popcount(equals), "int32"), "uint16")
                    if masks is not None:
                        masks[warp, expert] = T.uint32(0)
                T.sync_warp()
                item = ((before + lower) << EXPERT_BITS) | expert
                run.items[first + u * 32 + lane] = T.if_then_else(expert >= 0, item, -1)


@T.macro
def sum_over_warps(ranks: T.Buffer) -> Any:
    """Exclusive prefix sums of `ranks` over the warps, in place; return the total of the thread's expert."""
    thread, (warps, num_experts) = T.get_thread_binding(), ranks.shape
    values, count = T.alloc_local((warps,), "int32"), T.alloc_var("int32", init=0)
    if thread < num_experts:
        for w in T.unroll(warps):
            values[w] = T.cast(ranks[w, thread], "int32")
        for w in T.unroll(warps):
            ranks[w, thread] = T.cast(count, "uint16")
            count = count + values[w]
    return count


@T.macro
def sum_over_blocks(counts: T.Buffer, received: Any, rank: Any) -> tuple[Any, Any]:
    """Return the number of pairs of the thread's expert before the block's part, and in all.

    `counts` are those of the block's own chunk, `received` those of each chunk, or None where `counts` are of all.
    """
    thread = T.get_thread_binding()
    before, total, count = (T.alloc_var("int32", init=0) for _ in range(3))
    if thread < counts.shape[1]:
        before = counts[0, thread]
        if received is None:
            total = before + counts[1, thread]
        else:
            for other in T.unroll(received.shape[0]):
                count = T.cast(received[other, thread], "int32")
                total = total + count
                before = before + T.if_then_else(other < rank, count, 0)
    return before, total


@T.macro
def locate_segments(
    before: Any, total: Any, count: Any, alignment: Any, experts: Experts, segments: Segments
) -> tuple[Any, Any]:
    """Write `experts` and, in block 0, `segments`; return the end of the last segment and the block's number of pairs.

    `before`, `total` and `count` are the numbers of pairs of the thread's expert before the part, in all, and in it.
    """
    thread, num_experts = T.get_thread_binding(), experts.first_pos.shape[0]
    size = T.alloc_var("int32", init=0)
    sums, all_sums = T.alloc_local((2,), "int32"), T.alloc_local((2,), "int32")
    if thread < num_experts:
        size = total + alignment - 1
        if T.bitwise_and(alignment, alignment - 1) == 0:  # a power of two needs no division
            size = T.bitwise_and(size, -alignment)
        else:
            size = T.truncdiv(size, alignment) * alignment
    sums[0] = size
    sums[1] = count
    scan_two(sums, all_sums)
    if thread < num_experts:
        experts.first_sorted[thread] = sums[1] - count
        experts.first_pos[thread] = sums[0] - size + before
        experts.padding_start[thread] = sums[0] - size + total
        experts.padding_end[thread] = sums[0]
        if T.get_block_binding() == 0:
            segments.start[thread] = sums[0] - size
            segments.end[thread] = sums[0]
            segments.size[thread] = size
            if segments.psum is not None:
                segments.psum[thread] = sums[0] - size + total
    return all_sums[0], all_sums[1]


@T.macro
def _fill(first: Any, last: Any, step: Any, maps: Maps) -> None:
    """Write -1 to every `step`-th position of the maps from `first` on, below `last`."""
    pos = T.alloc_var("int32", init=first)
    end = T.alloc_var("int32", init=T.min(last, maps.pos_to_expert.shape[0]))
    while pos < end:
        maps.pos_to_expert[pos] = -1
        maps.pos_to_token[pos] = -1
        maps.pos_to_token_topk[pos] = -1
        pos = pos + step


@T.macro
def fill_padding(experts: Experts, end: Any, num_blocks: Any, maps: Maps) -> None:
    """Write -1 to the maps where no pair is: each warp in some experts' padding, all threads from `end` on."""
    thread, threads, block = T.get_thread_binding(), T.get_thread_extent(), T.get_block_binding()
    warps, (warp, lane), num_experts = threads // 32, _warp_and_lane(), experts.first_pos.shape[0]
    for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
        expert = (j * warps + warp) * num_blocks + block
        if expert < num_experts:
            _fill(experts.padding_start[expert] + lane, experts.padding_end[expert], 32, maps)
    _fill(end + block * threads + thread, maps.pos_to_expert.shape[0], num_blocks * threads, maps)


@T.macro
def sort_run(run: Run, experts: Experts, sorted_items: T.Buffer, flat_pos: T.Buffer, num_pos: Any) -> None:
    """Sort each warp's run by expert, to expert << PAIR_BITS | index; write positions, -1 without an expert or room."""
    warp, lane = _warp_and_lane()
    index, item, expert, offset, pos = (T.alloc_var("int32") for _ in range(5))
    for j in T.unroll(T.ceildiv(run.end - run.first, 32), unroll_factor=2):
        index = run.first + j * 32 + lane
        if index < run.end:
            item = run.items[index]
            pos = -1
            if item >= 0:
                expert = item & (2**EXPERT_BITS - 1)
                offset = T.cast(run.ranks[warp, expert], "int32") + (item >> EXPERT_BITS)
                sorted_items[experts.first_sorted[expert] + offset] = (expert << PAIR_BITS) | index
                pos = experts.first_pos[expert] + offset
            flat_pos[run.begin + index] = T.if_then_else(pos < num_pos, pos, -1)


@T.macro
def write_maps(begin: Any, count: Any, num_topk: int, sorted_items: T.Buffer, experts: Experts, maps: Maps) -> None:
    """Write expert, token and pair of each of the block's positions; neighbouring threads write neighbouring ones."""
    thread, threads = T.get_thread_binding(), T.get_thread_extent()
    item, expert, pos = (T.alloc_var("int32") for _ in range(3))
    for j in T.unroll(T.ceildiv(count, threads), unroll_factor=2):
        if j * threads + thread < count:
            item = sorted_items[j * threads + thread]
            expert = item >> PAIR_BITS
            pos = experts.first_pos[expert] + j * threads + thread - experts.first_sorted[expert]
            if pos < maps.pos_to_expert.shape[0]:
                pair = begin + (item & (2**PAIR_BITS - 1))
                maps.pos_to_expert[pos] = expert
                maps.pos_to_token[pos] = pair // num_topk
                maps.pos_to_token_topk[pos] = pair
