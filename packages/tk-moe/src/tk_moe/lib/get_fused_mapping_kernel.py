"""The kernels of get_fused_mapping.

Each thread block takes consecutive pairs, and each of its warps a run of consecutive pairs of those:

    1. A warp counts its run by expert in shared memory, 32 pairs at a time. Lanes with equal experts find each other by
       setting their bits in one word. A pair's rank within the run is the count so far plus the equal lanes below it.
    2. Prefix sums of these counts over the warps give each warp's offset, and over the thread blocks each block's. A
       prefix sum of the aligned sizes over the experts gives the segments.
    3. token_topk_to_pos is written in the order of the pairs. The pos_to_* are written in the order of the experts, for
       which the pairs are first sorted in shared memory, so that the writes are coalesced.

How a thread block learns the counts of the others depends on the number of pairs (`GetFusedMappingConfig.best`).

With one launch, every cluster counts all pairs: block b of each cluster counts the b-th chunk. A chunk has a part for
each cluster, and beyond counting, the block of cluster c works on part c alone. The blocks of a cluster send their
counts to each other; clusters do not communicate.

    pairs    │      chunk 0      │      chunk 1      │ …
    cluster  │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │ …

For more pairs, and where there are no clusters, a first launch writes the blocks' counts to global memory. All sums are
of integers, so the result does not depend on the number of thread blocks.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.bits import atomic_or_u32, warp_sum_u32
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_moe.device.async_copy import expect_bytes, init_mbarrier, send_to_cluster, wait_for_cluster
from tk_moe.lib.get_fused_mapping_config import GetFusedMappingConfig

_EXPERT_BITS = 10  # for at most 1024 experts
_PAIR_BITS = 16  # for the index of a pair within its thread block


def _expert_of(index: Any, num_experts: int) -> Any:
    """An index as an int32, -1 if it is not that of an expert."""
    import tilelang.language as T

    return T.if_then_else(T.And(index >= 0, index < num_experts), T.cast(index, "int32"), -1)


# All barriers are written out here, those between the lanes of a warp too.
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


@kernel(pass_configs=_PASS_CONFIGS)
def count_kernel(
    num_experts: int, num_topk: int, idx_dtype: torch.dtype, config: GetFusedMappingConfig, arch: Arch
) -> Any:
    """The first of two launches: the number of pairs by thread block and expert."""
    import tilelang.language as T

    threads, rounds = config.warps * 32, 4
    num_tokens, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_blocks")

    @T.prim_func
    def count_experts(
        topk_idx: T.Tensor((num_tokens, num_topk), idx_dtype),
        block_counts: T.Tensor((num_blocks, num_experts), "int32"),
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            num_pairs = num_tokens * num_topk
            pairs = T.view(topk_idx, (num_tokens * num_topk,), idx_dtype)
            chunk = T.ceildiv(T.ceildiv(num_pairs, num_blocks), 32) * 32  # as in the second launch
            counts = T.alloc_shared((num_experts,), "int32")
            indices = T.alloc_local((rounds,), idx_dtype)
            if thread < num_experts:
                counts[thread] = 0
            T.sync_threads()
            for batch in T.serial(T.ceildiv(chunk, threads * rounds)):
                for u in T.unroll(rounds):
                    index = (batch * rounds + u) * threads + thread
                    indices[u] = T.cast(-1, idx_dtype)
                    if index < chunk and index < num_pairs - block * chunk:
                        indices[u] = pairs[block * chunk + index]
                for u in T.unroll(rounds):
                    if indices[u] >= 0 and indices[u] < num_experts:
                        T.atomic_add(counts[T.cast(indices[u], "int32")], 1)
            T.sync_threads()
            if thread < num_experts:
                block_counts[block, thread] = counts[thread]

    return count_experts


@kernel(pass_configs=_PASS_CONFIGS)
def mapping_kernel(
    num_experts: int,
    num_topk: int,
    idx_dtype: torch.dtype,
    with_psum: bool,
    config: GetFusedMappingConfig,
    arch: Arch,
) -> Any:
    """The whole mapping in one launch, or the second of two launches, which also takes the counts of the first.

    block_counts is None with one launch, expert_psum without `with_psum`.
    """
    import tilelang.language as T

    warps, rounds, cluster_size = config.warps, config.rounds, config.cluster_size
    threads = warps * 32
    groups = threads // num_experts  # threads per expert that add up the counts of the blocks
    row = align(num_experts, 8)  # of 16-bit counts
    run_batch = rounds if cluster_size == 0 else 1  # with clusters, the part is in the cache since the counting
    num_tokens, num_pos = T.dynamic("num_tokens"), T.dynamic("num_pos")
    num_blocks = cluster_size * config.num_clusters or T.dynamic("num_blocks")
    num_chunks, num_parts = cluster_size or num_blocks, config.num_clusters
    in_memory = config.finds_equals_in_memory(num_experts)
    expert_mask = 2**_EXPERT_BITS - 1
    pair_mask = 2**_PAIR_BITS - 1

    @T.macro
    def clear(words: T.Buffer, size: int, thread: T.int32) -> None:
        for j in T.unroll(ceil_div(size, threads * 4)):
            if (j * threads + thread) * 4 < size:
                for v in T.vectorized(4):
                    words[(j * threads + thread) * 4 + v] = T.uint32(0)

    @T.macro
    def count_chunk(
        pairs: T.Buffer, begin: T.int32, size: T.int32, part: T.int32, thread: T.int32, counts: T.Buffer
    ) -> None:
        """Count the pairs of a chunk by expert: those before this block's part, and those from there on."""
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

    @T.macro
    def count_run(
        pairs: T.Buffer,
        begin: T.int32,
        size: T.int32,
        run: T.int32,
        run_rounds: T.int32,
        warp: T.int32,
        lane: T.int32,
        ranks: T.Buffer,
        masks: T.Buffer,
        items: T.Buffer,
    ) -> None:
        """Count the pairs of a warp's run by expert in `ranks`, and note each pair's expert and rank in `items`."""
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
                experts[u] = _expert_of(indices[u], num_experts)
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
                        experts[u] >= 0, ((before + lower) << _EXPERT_BITS) | experts[u], -1
                    )

    @T.macro
    def offsets_of_warps(thread: T.int32, ranks: T.Buffer, count: T.Buffer) -> None:
        """Exclusive prefix sum of the counts over the warps, in place; `count` becomes the total."""
        values = T.alloc_local((warps,), "int32")
        count[0] = 0
        if thread < num_experts:
            for w in T.unroll(warps):
                values[w] = T.cast(ranks[w * num_experts + thread], "int32")
            for w in T.unroll(warps):
                ranks[w * num_experts + thread] = T.cast(count[0], "uint16")
                count[0] = count[0] + values[w]

    @T.macro
    def scan(warp: T.int32, lane: T.int32, warp_sums: T.Buffer, sums: T.Buffer, all_sums: T.Buffer) -> None:
        """Inclusive prefix sum over the threads of the block, in place; `all_sums` become the totals."""
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
    def fill_padding(first: T.int32, last: T.int32, step: T.int32, maps: Any) -> None:
        pos = T.alloc_var("int32")
        end = T.alloc_var("int32")
        pos = first
        end = T.min(last, num_pos)
        while pos < end:
            maps[0][pos] = -1
            maps[1][pos] = -1
            maps[2][pos] = -1
            pos = pos + step

    @T.prim_func
    def get_fused_mapping(
        topk_idx: T.Tensor((num_tokens, num_topk), idx_dtype),
        block_counts: T.Tensor((num_blocks, num_experts), "int32"),
        pos_to_expert: T.Tensor((num_pos,), "int32"),
        pos_to_token: T.Tensor((num_pos,), "int32"),
        pos_to_token_topk: T.Tensor((num_pos,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        expert_start: T.Tensor((num_experts,), "int32"),
        expert_end: T.Tensor((num_experts,), "int32"),
        num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        expert_psum: T.Tensor((num_experts,), "int32"),
        alignment: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads, cluster_dims=max(cluster_size, 1)) as block:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            num_pairs = num_tokens * num_topk
            pairs = T.view(topk_idx, (num_tokens * num_topk,), idx_dtype)
            flat_pos = T.view(token_topk_to_pos, (num_tokens * num_topk,), "int32")
            # Each block has a part and each warp a run of that, all multiples of 32 pairs.
            begin, size = T.alloc_var("int32"), T.alloc_var("int32")  # of the part
            run, run_rounds = T.alloc_var("int32"), T.alloc_var("int32")  # its offset in the part; its length / 32
            part = T.ceildiv(T.ceildiv(num_pairs, num_chunks), num_parts * 32) * 32
            run_length = T.ceildiv(part, threads) * 32
            rank = block % num_chunks  # of the block in its cluster
            begin = (rank * num_parts + block // num_chunks) * part
            size = T.max(T.min(num_pairs - begin, part), 0)
            run = warp * run_length
            run_rounds = T.ceildiv(T.max(T.min(size - run, run_length), 0), 32)

            ranks = T.alloc_shared((warps * num_experts,), "uint16")
            masks = T.alloc_shared((warps * num_experts if in_memory else 4,), "uint32")
            items = T.alloc_shared((config.room,), "int32")
            sorted_items = T.alloc_shared((config.room,), "int32")
            counts = T.alloc_shared((2, num_experts), "int32")
            chunk_count = T.alloc_shared((row,), "uint16")
            chunk_counts = T.alloc_shared((max(cluster_size, 1), row), "uint16")
            first_pos = T.alloc_shared((num_experts,), "int32")
            first_sorted = T.alloc_shared((num_experts,), "int32")
            padding_start = T.alloc_shared((num_experts,), "int32")
            padding_end = T.alloc_shared((num_experts,), "int32")
            warp_sums = T.alloc_shared((2, warps), "uint32")
            arrived = T.alloc_shared((1,), "uint64")

            # Numbers of pairs of this thread's expert: in the part, before it, and in all.
            count = T.alloc_local((1,), "int32")
            prefix = T.alloc_var("int32")
            total = T.alloc_var("int32")
            pos = T.alloc_var("int32")
            sums = T.alloc_local((2,), "int32")  # of aligned sizes; of this part's pairs
            all_sums = T.alloc_local((2,), "int32")

            if cluster_size > 1:
                if thread == 0:
                    init_mbarrier(T.access_ptr(arrived[0], "rw"))
                T.sync_warp()
                T.cluster_arrive_relaxed()
            clear(T.view(ranks, (warps * num_experts // 2,), "uint32"), warps * num_experts // 2, thread)
            if in_memory:
                clear(masks, warps * num_experts, thread)
            if thread < num_experts:
                counts[0, thread] = 0
                counts[1, thread] = 0
            T.sync_threads()
            if cluster_size > 1 and thread == 0:
                num_bytes = cluster_size * row * 2
                expect_bytes(T.access_ptr(arrived[0], "rw"), num_bytes)

            prefix = 0
            total = 0
            if cluster_size > 0:
                count_chunk(
                    pairs,
                    rank * num_parts * part,
                    T.min(num_pairs - rank * num_parts * part, num_parts * part),
                    block // num_chunks * part,
                    thread,
                    counts,
                )
                T.sync_threads()
                if thread < num_experts:
                    prefix = counts[0, thread]
                    total = prefix + counts[1, thread]
            if cluster_size > 1:
                if thread < num_experts:
                    chunk_count[thread] = T.cast(total, "uint16")
                T.sync_threads()
                T.cluster_wait()  # until all blocks have started and their shared memory can be written
                if warp < cluster_size:
                    for j in T.unroll(ceil_div(row, 256)):
                        if (j * 32 + lane) * 8 < row:
                            send_to_cluster(
                                T.access_ptr(chunk_counts[rank, (j * 32 + lane) * 8], "w"),
                                T.access_ptr(chunk_count[(j * 32 + lane) * 8], "r"),
                                T.access_ptr(arrived[0], "rw"),
                                warp,
                            )
            if cluster_size == 0 and thread < groups * num_experts:
                for i in T.serial(T.ceildiv(num_blocks - thread // num_experts, groups)):
                    counted = T.alloc_var("int32")
                    counted = block_counts[i * groups + thread // num_experts, thread % num_experts]
                    total = total + counted
                    prefix = prefix + T.if_then_else(i * groups + thread // num_experts < block, counted, 0)
                T.atomic_add(counts[0, thread % num_experts], prefix)
                T.atomic_add(counts[1, thread % num_experts], total)

            count_run(pairs, begin, size, run, run_rounds, warp, lane, ranks, masks, items)
            T.sync_threads()
            offsets_of_warps(thread, ranks, count)
            if cluster_size > 1:
                wait_for_cluster(T.access_ptr(arrived[0], "rw"))
                if thread < num_experts:
                    total = 0
                    for other in T.unroll(cluster_size):
                        counted = T.alloc_var("int32")
                        counted = T.cast(chunk_counts[other, thread], "int32")
                        total = total + counted
                        prefix = prefix + T.if_then_else(other < rank, counted, 0)
            if cluster_size == 0 and thread < num_experts:
                prefix = counts[0, thread]
                total = counts[1, thread]

            size_of_segment = T.alloc_var("int32")
            size_of_segment = 0
            if thread < num_experts:
                size_of_segment = total + alignment - 1
                if T.bitwise_and(alignment, alignment - 1) == 0:  # a power of two needs no division
                    size_of_segment = T.bitwise_and(size_of_segment, -alignment)
                else:
                    size_of_segment = T.truncdiv(size_of_segment, alignment) * alignment
            sums[0] = size_of_segment
            sums[1] = count[0]
            scan(warp, lane, warp_sums, sums, all_sums)
            if thread < num_experts:
                first_pos[thread] = sums[0] - size_of_segment + prefix
                padding_start[thread] = sums[0] - size_of_segment + total
                padding_end[thread] = sums[0]
                first_sorted[thread] = sums[1] - count[0]
                if block == 0:
                    expert_start[thread] = sums[0] - size_of_segment
                    expert_end[thread] = sums[0]
                    num_tokens_per_expert[thread] = size_of_segment
                    if with_psum:
                        expert_psum[thread] = sums[0] - size_of_segment + total
            T.sync_threads()

            maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
            for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
                expert = (j * warps + warp) * num_blocks + block
                if expert < num_experts:
                    fill_padding(padding_start[expert] + lane, padding_end[expert], 32, maps)
            fill_padding(all_sums[0] + block * threads + thread, num_pos, num_blocks * threads, maps)

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
                        expert = item & expert_mask
                        offset = T.cast(ranks[warp * num_experts + expert], "int32") + (item >> _EXPERT_BITS)
                        sorted_items[first_sorted[expert] + offset] = (expert << _PAIR_BITS) | index
                        pos = first_pos[expert] + offset
                    flat_pos[begin + index] = T.if_then_else(pos < num_pos, pos, -1)
            T.sync_threads()
            for j in T.unroll(T.ceildiv(all_sums[1], threads), unroll_factor=2):
                if j * threads + thread < all_sums[1]:
                    item = T.alloc_var("int32")
                    expert = T.alloc_var("int32")
                    item = sorted_items[j * threads + thread]
                    expert = item >> _PAIR_BITS
                    pos = first_pos[expert] + j * threads + thread - first_sorted[expert]
                    if pos < num_pos:
                        pos_to_expert[pos] = expert
                        pos_to_token[pos] = (begin + (item & pair_mask)) // num_topk
                        pos_to_token_topk[pos] = begin + (item & pair_mask)

    return get_fused_mapping
