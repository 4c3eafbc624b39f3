"""The steps of get_fused_mapping's kernels; get_fused_mapping_kernel.py has the picture.

A pair is a token with one of its experts. A warp's run of pairs is noted in `items`: a pair's rank among those of its
expert in the run, shifted by `EXPERT_BITS`, and its expert; or -1 where the index is that of no expert. `runs` are the
part's first pair and its size, the offset of the warp's run in it, and the run's length / 32.
"""

from typing import Any

import tilelang.language as T

from tk_core.device.bits import atomic_or_u32, warp_sum_u32
from tk_core.math import ceil_div
from tk_moe.device.async_copy import send_to_cluster
from tk_moe.lib.get_fused_mapping_config import GetFusedMappingConfig

EXPERT_BITS = 10
"""For at most 1024 experts."""
PAIR_BITS = 16
"""For the index of a pair within its thread block."""


@T.macro
def clear(words: T.Buffer, threads: int, thread: Any) -> None:
    """Zero uint32 words of shared memory, a multiple of 4."""
    size = words.shape[0]
    for j in T.unroll(ceil_div(size, threads * 4)):
        if (j * threads + thread) * 4 < size:
            for v in T.vectorized(4):
                words[(j * threads + thread) * 4 + v] = T.uint32(0)


@T.macro
def count_chunk(
    pairs: T.Buffer, begin: Any, size: Any, part: Any, thread: Any, counts: T.Buffer, config: GetFusedMappingConfig
) -> None:
    """Count a chunk's pairs by expert: into counts[0] those before pair `part`, into counts[1] those from there on."""
    threads, rounds = 32 * config.warps, config.rounds
    indices = T.alloc_local((rounds,), pairs.dtype)
    after = T.alloc_var("int32")
    for batch in T.serial(T.ceildiv(size, threads * rounds)):
        for u in T.unroll(rounds):
            index = (batch * rounds + u) * threads + thread
            indices[u] = T.cast(-1, pairs.dtype)
            if index < size:
                indices[u] = pairs[begin + index]
        for u in T.unroll(rounds):
            if indices[u] >= 0 and indices[u] < counts.shape[1]:
                after = T.if_then_else((batch * rounds + u) * threads + thread < part, 0, 1)
                T.atomic_add(counts[after, T.cast(indices[u], "int32")], 1)


@T.macro
def exchange_counts(
    chunk_count: T.Buffer, chunk_counts: T.Buffer, arrived: T.Buffer, rank: Any, warp: Any, lane: Any
) -> None:
    """Send a chunk's uint16 counts to the cluster's blocks: warp b to block b, whose mbarrier counts the bytes."""
    cluster_size, row = chunk_counts.shape
    if warp < cluster_size:
        for j in T.unroll(ceil_div(row, 256)):
            if (j * 32 + lane) * 8 < row:
                send_to_cluster(
                    T.access_ptr(chunk_counts[rank, (j * 32 + lane) * 8], "w"),
                    T.access_ptr(chunk_count[(j * 32 + lane) * 8], "r"),
                    T.access_ptr(arrived[0], "rw"),
                    warp,
                )


@T.macro
def add_block_counts(
    block_counts: T.Buffer, block: Any, num_blocks: Any, threads: int, thread: Any, counts: T.Buffer
) -> None:
    """Add the first launch's counts of the blocks before this one to counts[0], those of all blocks to counts[1]."""
    num_experts = counts.shape[1]
    groups = threads // num_experts  # so many threads serve an expert
    if thread < groups * num_experts:
        prefix, total = T.alloc_var("int32"), T.alloc_var("int32")
        prefix = 0
        total = 0
        for i in T.serial(T.ceildiv(num_blocks - thread // num_experts, groups)):
            counted = T.alloc_var("int32")
            counted = block_counts[i * groups + thread // num_experts, thread % num_experts]
            total = total + counted
            prefix = prefix + T.if_then_else(i * groups + thread // num_experts < block, counted, 0)
        T.atomic_add(counts[0, thread % num_experts], prefix)
        T.atomic_add(counts[1, thread % num_experts], total)


@T.macro
def count_run(
    pairs: T.Buffer,
    runs: Any,
    warp: Any,
    lane: Any,
    ranks: T.Buffer,
    masks: T.Buffer,
    items: T.Buffer,
    num_experts: int,
    config: GetFusedMappingConfig,
) -> None:
    """Count the pairs of a warp's run by expert, into `ranks`.

    Lanes with equal experts find each other by bits in `masks` or by a match instruction.
    """
    begin, size, run, run_rounds = runs
    # With clusters the part has been read before, to count it, so few loads in flight are enough.
    run_batch = config.rounds if config.cluster_size == 0 else 1
    in_memory = config.finds_equals_in_memory(num_experts)
    indices = T.alloc_local((run_batch,), pairs.dtype)
    experts = T.alloc_local((run_batch,), "int32")
    equals = T.alloc_local((run_batch,), "uint32")
    before = T.alloc_var("int32")
    lower = T.alloc_var("int32")
    bit = T.uint32(1) << T.cast(lane, "uint32")
    for batch in T.serial(T.ceildiv(run_rounds, run_batch)):
        for u in T.unroll(run_batch):
            indices[u] = T.cast(-1, pairs.dtype)
            if batch * run_batch + u < run_rounds and run + (batch * run_batch + u) * 32 + lane < size:
                indices[u] = pairs[begin + run + (batch * run_batch + u) * 32 + lane]
        for u in T.unroll(run_batch):
            is_expert = T.And(indices[u] >= 0, indices[u] < num_experts)
            experts[u] = T.if_then_else(is_expert, T.cast(indices[u], "int32"), -1)
            if not in_memory:
                equals[u] = T.match_any_sync(experts[u])
        for u in T.unroll(run_batch):
            if batch * run_batch + u < run_rounds:  # uniform in a warp
                if in_memory:
                    # A match instruction occupies the whole SM for 60 cycles where all experts differ.
                    equals[u] = T.uint32(0)
                    if experts[u] >= 0:
                        atomic_or_u32(T.access_ptr(masks[warp * num_experts + experts[u]], "rw"), bit)
                    T.sync_warp()
                    if experts[u] >= 0:
                        equals[u] = masks[warp * num_experts + experts[u]]
                lower = T.cast(T.popcount(equals[u] & (bit - T.uint32(1))), "int32")
                before = 0
                if experts[u] >= 0:
                    before = T.cast(ranks[warp * num_experts + experts[u]], "int32")
                T.sync_warp()
                if experts[u] >= 0 and lower == 0:
                    after = before + T.cast(T.popcount(equals[u]), "int32")
                    ranks[warp * num_experts + experts[u]] = T.cast(after, "uint16")
                    if in_memory:
                        masks[warp * num_experts + experts[u]] = T.uint32(0)
                T.sync_warp()
                items[run + (batch * run_batch + u) * 32 + lane] = T.if_then_else(
                    experts[u] >= 0, ((before + lower) << EXPERT_BITS) | experts[u], -1
                )


@T.macro
def offsets_of_warps(thread: Any, ranks: T.Buffer, num_experts: int, count: T.Buffer) -> None:
    """Exclusive prefix sums of `ranks` over the warps, in place; count[0] becomes the total of the thread's expert."""
    warps = ranks.shape[0] // num_experts
    values = T.alloc_local((warps,), "int32")
    count[0] = 0
    if thread < num_experts:
        for w in T.unroll(warps):
            values[w] = T.cast(ranks[w * num_experts + thread], "int32")
        for w in T.unroll(warps):
            ranks[w * num_experts + thread] = T.cast(count[0], "uint16")
            count[0] = count[0] + values[w]


@T.macro
def _scan(warp: Any, lane: Any, warp_sums: T.Buffer, sums: T.Buffer, all_sums: T.Buffer) -> None:
    """Two inclusive prefix sums over the threads of the block, of `sums` in place; `all_sums` become the totals."""
    warps = warp_sums.shape[1]
    shifted = T.alloc_local((2,), "int32")
    of_warp = T.alloc_var("uint32")
    for step in T.unroll(5):
        for i in T.unroll(2):
            shifted[i] = T.shfl_up(sums[i], 1 << step)
        for i in T.unroll(2):
            sums[i] = sums[i] + T.if_then_else(lane >= (1 << step), shifted[i], 0)
    if lane == 31:
        for i in T.unroll(2):
            warp_sums[i, warp] = T.cast(sums[i], "uint32")
    T.sync_threads()
    for i in T.unroll(2):
        of_warp = T.uint32(0)
        if lane < warps:
            of_warp = warp_sums[i, lane]
        all_sums[i] = T.cast(warp_sum_u32(of_warp), "int32")
        of_warp = T.if_then_else(lane < warp, of_warp, T.uint32(0))
        sums[i] = sums[i] + T.cast(warp_sum_u32(of_warp), "int32")


@T.macro
def add_cluster_counts(chunk_counts: T.Buffer, rank: Any, expert: Any, prefix: T.Ref, total: T.Ref) -> None:
    """Sums of what the cluster's blocks sent: over all blocks into total, those before this one are added to prefix."""
    total = 0
    for other in T.unroll(chunk_counts.shape[0]):
        counted = T.alloc_var("int32")
        counted = T.cast(chunk_counts[other, expert], "int32")
        total = total + counted
        prefix = prefix + T.if_then_else(other < rank, counted, 0)


@T.macro
def locate_segments(
    alignment: Any,
    block: Any,
    thread: Any,
    prefix: Any,
    total: Any,
    count: Any,
    warp_sums: T.Buffer,
    all_sums: T.Buffer,
    firsts: Any,
    padding: Any,
    segments: Any,
) -> None:
    """Where the pairs of each expert begin, from the numbers of the thread's expert: before the part, in all, in it.

    `firsts`: of each expert, the first of the block's pairs in the sorted order, and its first position. `padding`:
    where the padding of its segment starts and ends. Thread block 0 writes the `segments`: start, end, size, and where
    the pairs end, unless that is None. all_sums[0] is the end of all segments, all_sums[1] the number of pairs.
    """
    first_sorted, first_pos = firsts
    size, sums = T.alloc_var("int32"), T.alloc_local((2,), "int32")
    size = 0
    if thread < first_pos.shape[0]:
        size = total + alignment - 1
        if T.bitwise_and(alignment, alignment - 1) == 0:  # a power of two needs no division
            size = T.bitwise_and(size, -alignment)
        else:
            size = T.truncdiv(size, alignment) * alignment
    sums[0] = size
    sums[1] = count
    _scan(thread // 32, thread % 32, warp_sums, sums, all_sums)
    if thread < first_pos.shape[0]:
        first_pos[thread] = sums[0] - size + prefix
        first_sorted[thread] = sums[1] - count
        padding[0][thread] = sums[0] - size + total
        padding[1][thread] = sums[0]
        if block == 0:
            segments[0][thread] = sums[0] - size
            segments[1][thread] = sums[0]
            segments[2][thread] = size
            if segments[3] is not None:
                segments[3][thread] = sums[0] - size + total


@T.macro
def _fill(first: Any, last: Any, step: Any, maps: Any, num_pos: Any) -> None:
    pos, end = T.alloc_var("int32"), T.alloc_var("int32")
    pos = first
    end = T.min(last, num_pos)
    while pos < end:
        maps[0][pos] = -1
        maps[1][pos] = -1
        maps[2][pos] = -1
        pos = pos + step


@T.macro
def fill_padding(
    block: Any, num_blocks: Any, warps: int, thread: Any, padding: Any, end: Any, maps: Any, num_pos: Any
) -> None:
    """Write -1 to the maps where no pair is: from padding[0][e] to padding[1][e] for each expert e, and past `end`."""
    num_experts = padding[0].shape[0]
    for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
        expert = (j * warps + thread // 32) * num_blocks + block
        if expert < num_experts:
            _fill(padding[0][expert] + thread % 32, padding[1][expert], 32, maps, num_pos)
    _fill(end + block * (32 * warps) + thread, num_pos, num_blocks * (32 * warps), maps, num_pos)


@T.macro
def sort_run(
    runs: Any,
    warp: Any,
    lane: Any,
    items: T.Buffer,
    ranks: T.Buffer,
    firsts: Any,
    sorted_items: T.Buffer,
    flat_pos: T.Buffer,
    num_pos: Any,
) -> None:
    """Sort a run by expert and write positions of its pairs; a sorted item: expert << PAIR_BITS | pair."""
    begin, size, run, run_rounds = runs
    first_sorted, first_pos = firsts
    pos = T.alloc_var("int32")
    for j in T.unroll(run_rounds, unroll_factor=2):
        index = T.alloc_var("int32")
        index = run + j * 32 + lane
        if index < size:
            item = T.alloc_var("int32")
            offset = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            item = items[index]
            pos = -1
            if item >= 0:
                expert = item & (2**EXPERT_BITS - 1)
                offset = T.cast(ranks[warp * first_pos.shape[0] + expert], "int32") + (item >> EXPERT_BITS)
                sorted_items[first_sorted[expert] + offset] = (expert << PAIR_BITS) | index
                pos = first_pos[expert] + offset
            flat_pos[begin + index] = T.if_then_else(pos < num_pos, pos, -1)


@T.macro
def write_positions(
    begin: Any,
    count: Any,
    thread: Any,
    threads: int,
    num_topk: int,
    sorted_items: T.Buffer,
    firsts: Any,
    maps: Any,
    num_pos: Any,
) -> None:
    """Write expert, token and pair of each of the block's positions; neighbouring threads write neighbouring ones."""
    first_sorted, first_pos = firsts
    pos_to_expert, pos_to_token, pos_to_token_topk = maps
    pos = T.alloc_var("int32")
    for j in T.unroll(T.ceildiv(count, threads), unroll_factor=2):
        if j * threads + thread < count:
            item = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            item = sorted_items[j * threads + thread]
            expert = item >> PAIR_BITS
            pos = first_pos[expert] + j * threads + thread - first_sorted[expert]
            if pos < num_pos:
                pos_to_expert[pos] = expert
                pos_to_token[pos] = (begin + (item & (2**PAIR_BITS - 1))) // num_topk
                pos_to_token_topk[pos] = begin + (item & (2**PAIR_BITS - 1))
