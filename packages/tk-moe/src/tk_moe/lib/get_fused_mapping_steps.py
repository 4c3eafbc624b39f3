"""The steps of get_fused_mapping's kernels, as macros; get_fused_mapping_kernel.py has the picture.

A pair is a token with one of its experts. A warp's run of pairs is noted in `items`: a pair's rank among those of its
expert in the run, shifted by `EXPERT_BITS`, and its expert; or -1 where the index is that of no expert.
"""

from functools import cache
from typing import Any

import torch

from tk_core.device.bits import atomic_or_u32, warp_sum_u32
from tk_core.math import align, ceil_div
from tk_moe.device.async_copy import send_to_cluster
from tk_moe.lib.get_fused_mapping_config import GetFusedMappingConfig

EXPERT_BITS = 10
"""For at most 1024 experts."""
PAIR_BITS = 16
"""For the index of a pair within its thread block."""


@cache
def clear_macro(threads: int) -> Any:
    """Macro `clear(words, size, thread)`: zero uint32 words of shared memory, a multiple of 4."""
    import tilelang.language as T

    @T.macro
    def clear(words: T.Buffer, size: int, thread: T.int32) -> None:
        for j in T.unroll(ceil_div(size, threads * 4)):
            if (j * threads + thread) * 4 < size:
                for v in T.vectorized(4):
                    words[(j * threads + thread) * 4 + v] = T.uint32(0)

    return clear


@cache
def count_chunk_macro(num_experts: int, idx_dtype: torch.dtype, config: GetFusedMappingConfig) -> Any:
    """Macro `count_chunk(pairs, begin, size, part, thread, counts)`: count a chunk's pairs by expert.

    counts[0] gets those before this block's part, which is `part` pairs away, counts[1] those from there on.
    """
    import tilelang.language as T

    threads, rounds = 32 * config.warps, config.rounds

    @T.macro
    def count_chunk(
        pairs: T.Buffer, begin: T.int32, size: T.int32, part: T.int32, thread: T.int32, counts: T.Buffer
    ) -> None:
        indices = T.alloc_local((rounds,), idx_dtype)
        after = T.alloc_var("int32")
        for batch in T.serial(T.ceildiv(size, threads * rounds)):
            for u in T.unroll(rounds):
                index = (batch * rounds + u) * threads + thread
                indices[u] = T.cast(-1, idx_dtype)
                if index < size:
                    indices[u] = pairs[begin + index]
            for u in T.unroll(rounds):
                if indices[u] >= 0 and indices[u] < num_experts:
                    after = T.if_then_else((batch * rounds + u) * threads + thread < part, 0, 1)
                    T.atomic_add(counts[after, T.cast(indices[u], "int32")], 1)

    return count_chunk


@cache
def exchange_counts_macro(num_experts: int, cluster_size: int) -> Any:
    """Macro `exchange_counts(chunk_count, chunk_counts, arrived, rank, warp, lane)`: send a chunk's counts.

    uint16 counts of a row, a multiple of 8. Warp b sends to the cluster's block b, whose mbarrier counts the bytes.
    """
    import tilelang.language as T

    row = align(num_experts, 8)

    @T.macro
    def exchange_counts(
        chunk_count: T.Buffer, chunk_counts: T.Buffer, arrived: T.Buffer, rank: T.int32, warp: T.int32, lane: T.int32
    ) -> None:
        if warp < cluster_size:
            for j in T.unroll(ceil_div(row, 256)):
                if (j * 32 + lane) * 8 < row:
                    send_to_cluster(
                        T.access_ptr(chunk_counts[rank, (j * 32 + lane) * 8], "w"),
                        T.access_ptr(chunk_count[(j * 32 + lane) * 8], "r"),
                        T.access_ptr(arrived[0], "rw"),
                        warp,
                    )

    return exchange_counts


@cache
def add_block_counts_macro(num_experts: int, threads: int) -> Any:
    """Macro `add_block_counts(block_counts, block, num_blocks, thread, counts)`: sums of the first launch's counts.

    counts[0] gets the sums over the blocks before this one, counts[1] those over all; several threads serve an expert.
    """
    import tilelang.language as T

    groups = threads // num_experts

    @T.macro
    def add_block_counts(
        block_counts: T.Buffer, block: T.int32, num_blocks: T.int32, thread: T.int32, counts: T.Buffer
    ) -> None:
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

    return add_block_counts


@cache
def count_run_macro(num_experts: int, idx_dtype: torch.dtype, config: GetFusedMappingConfig) -> Any:
    """Macro `count_run(pairs, runs, warp, lane, ranks, masks, items)`: count the pairs of a warp's run by expert.

    The counts go to `ranks`. Lanes with equal experts find each other by `masks` or by a match instruction. `runs`: the
    part's first pair and its size, the run's offset in it, and the run's length / 32.
    """
    import tilelang.language as T

    # With clusters the part has been read before, to count it, so few loads in flight are enough.
    run_batch = config.rounds if config.cluster_size == 0 else 1
    in_memory = config.finds_equals_in_memory(num_experts)

    @T.macro
    def count_run(
        pairs: T.Buffer, runs: Any, warp: T.int32, lane: T.int32, ranks: T.Buffer, masks: T.Buffer, items: T.Buffer
    ) -> None:
        begin, size, run, run_rounds = runs
        indices = T.alloc_local((run_batch,), idx_dtype)
        experts = T.alloc_local((run_batch,), "int32")
        equals = T.alloc_local((run_batch,), "uint32")
        before = T.alloc_var("int32")
        lower = T.alloc_var("int32")
        bit = T.uint32(1) << T.cast(lane, "uint32")
        for batch in T.serial(T.ceildiv(run_rounds, run_batch)):
            for u in T.unroll(run_batch):
                indices[u] = T.cast(-1, idx_dtype)
                if batch * run_batch + u < run_rounds and run + (batch * run_batch + u) * 32 + lane < size:
                    indices[u] = pairs[begin + run + (batch * run_batch + u) * 32 + lane]
            for u in T.unroll(run_batch):
                experts[u] = T.if_then_else(
                    T.And(indices[u] >= 0, indices[u] < num_experts), T.cast(indices[u], "int32"), -1
                )
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

    return count_run


@cache
def offsets_of_warps_macro(num_experts: int, warps: int) -> Any:
    """Macro `offsets_of_warps(thread, ranks, count)`: exclusive prefix sum of `ranks` over the warps, in place.

    count[0] becomes the total of the thread's expert.
    """
    import tilelang.language as T

    @T.macro
    def offsets_of_warps(thread: T.int32, ranks: T.Buffer, count: T.Buffer) -> None:
        values = T.alloc_local((warps,), "int32")
        count[0] = 0
        if thread < num_experts:
            for w in T.unroll(warps):
                values[w] = T.cast(ranks[w * num_experts + thread], "int32")
            for w in T.unroll(warps):
                ranks[w * num_experts + thread] = T.cast(count[0], "uint16")
                count[0] = count[0] + values[w]

    return offsets_of_warps


@cache
def scan_macro(warps: int) -> Any:
    """Macro `scan(warp, lane, warp_sums, sums, all_sums)`: two inclusive prefix sums over the threads of the block.

    int32 (2,) `sums` in each thread, in place; `all_sums` become the totals. warp_sums is uint32 (2, warps), shared.
    """
    import tilelang.language as T

    @T.macro
    def scan(warp: T.int32, lane: T.int32, warp_sums: T.Buffer, sums: T.Buffer, all_sums: T.Buffer) -> None:
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

    return scan


@cache
def add_cluster_counts_macro(cluster_size: int) -> Any:
    """Macro `add_cluster_counts(chunk_counts, rank, expert, prefix, total)`: sums of what the cluster's blocks sent.

    total is over all blocks, and those before this one are added to prefix.
    """
    import tilelang.language as T

    @T.macro
    def add_cluster_counts(chunk_counts: T.Buffer, rank: T.int32, expert: T.int32, prefix: T.Ref, total: T.Ref) -> None:
        total = 0
        for other in T.unroll(cluster_size):
            counted = T.alloc_var("int32")
            counted = T.cast(chunk_counts[other, expert], "int32")
            total = total + counted
            prefix = prefix + T.if_then_else(other < rank, counted, 0)

    return add_cluster_counts


@cache
def fill_padding_macro(num_experts: int, warps: int) -> Any:
    """Macro `fill_padding(block, num_blocks, thread, padding, end, maps, num_pos)`: -1 in the maps where no pair is.

    `padding`: of each expert, where the padding of its segment starts and ends. Behind `end` there are no segments.
    """
    import tilelang.language as T

    @T.macro
    def fill(first: T.int32, last: T.int32, step: T.int32, maps: Any, num_pos: T.int32) -> None:
        pos = T.alloc_var("int32")
        end = T.alloc_var("int32")
        pos = first
        end = T.min(last, num_pos)
        while pos < end:
            maps[0][pos] = -1
            maps[1][pos] = -1
            maps[2][pos] = -1
            pos = pos + step

    @T.macro
    def fill_padding(
        block: T.int32, num_blocks: T.int32, thread: T.int32, padding: Any, end: T.int32, maps: Any, num_pos: T.int32
    ) -> None:
        for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
            expert = (j * warps + thread // 32) * num_blocks + block
            if expert < num_experts:
                fill(padding[0][expert] + thread % 32, padding[1][expert], 32, maps, num_pos)
        fill(end + block * (32 * warps) + thread, num_pos, num_blocks * (32 * warps), maps, num_pos)

    return fill_padding


@cache
def sort_run_macro(num_experts: int) -> Any:
    """Macro `sort_run(runs, warp, lane, items, ranks, firsts, sorted_items, flat_pos, num_pos)`: sort a run by expert.

    It also writes each pair's position. `runs` as for `count_run`; `firsts`: of each expert, the first of the block's
    pairs in the sorted order, and its first position. A sorted item is an expert, shifted by `PAIR_BITS`, and a pair.
    """
    import tilelang.language as T

    @T.macro
    def sort_run(
        runs: Any,
        warp: T.int32,
        lane: T.int32,
        items: T.Buffer,
        ranks: T.Buffer,
        firsts: Any,
        sorted_items: T.Buffer,
        flat_pos: T.Buffer,
        num_pos: T.int32,
    ) -> None:
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
                    offset = T.cast(ranks[warp * num_experts + expert], "int32") + (item >> EXPERT_BITS)
                    sorted_items[first_sorted[expert] + offset] = (expert << PAIR_BITS) | index
                    pos = first_pos[expert] + offset
                flat_pos[begin + index] = T.if_then_else(pos < num_pos, pos, -1)

    return sort_run


@cache
def write_positions_macro(threads: int, num_topk: int) -> Any:
    """Macro `write_positions(begin, count, thread, sorted_items, firsts, maps, num_pos)`: write the maps of the pairs.

    Neighbouring threads write neighbouring positions. `maps`: expert, token and pair of each position.
    """
    import tilelang.language as T

    @T.macro
    def write_positions(
        begin: T.int32,
        count: T.int32,
        thread: T.int32,
        sorted_items: T.Buffer,
        firsts: Any,
        maps: Any,
        num_pos: T.int32,
    ) -> None:
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

    return write_positions
