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
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_moe.device.async_copy import expect_bytes, init_mbarrier, send_to_cluster, wait_for_cluster
from tk_moe.lib.get_fused_mapping_config import GetFusedMappingConfig

_PAIR_BITS = 16
"""For the index of a pair within its thread block."""

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

    from tk_moe.lib import get_fused_mapping_steps as steps

    threads = config.warps * 32
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
            counts = T.alloc_shared((1, num_experts), "int32")
            begin, size = T.alloc_var("int32"), T.alloc_var("int32")
            begin = block * chunk
            size = T.min(chunk, num_pairs - begin)
            if thread < num_experts:
                counts[0, thread] = 0
            T.sync_threads()
            steps.count_pairs(pairs, begin, size, size, thread, counts, threads, 4)
            T.sync_threads()
            if thread < num_experts:
                block_counts[block, thread] = counts[0, thread]

    return count_experts


@kernel(pass_configs=_PASS_CONFIGS)
def mapping_kernel(
    num_experts: int, num_topk: int, idx_dtype: torch.dtype, with_psum: bool, config: GetFusedMappingConfig, arch: Arch
) -> Any:
    """The whole mapping in one launch, or the second of two launches, which also takes the counts of the first.

    block_counts is None with one launch, expert_psum without `with_psum`.
    """
    import tilelang.language as T

    from tk_moe.lib import get_fused_mapping_steps as steps

    warps, cluster_size = config.warps, config.cluster_size
    threads = warps * 32
    row = align(num_experts, 8)  # of 16-bit counts
    num_tokens, num_pos = T.dynamic("num_tokens"), T.dynamic("num_pos")
    num_blocks = cluster_size * config.num_clusters or T.dynamic("num_blocks")
    num_chunks, num_parts = cluster_size or num_blocks, config.num_clusters
    in_memory = config.finds_equals_in_memory(num_experts)
    # With clusters a run has been read before, to count the chunk, so few loads in flight are enough.
    run_batch = config.rounds if cluster_size == 0 else 1

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

            ranks = T.alloc_shared((warps, num_experts), "uint16")
            masks = T.alloc_shared((warps, num_experts) if in_memory else (1, 4), "uint32")
            items = T.alloc_shared((config.room,), "int32")
            sorted_items = T.alloc_shared((config.room,), "int32")
            counts = T.alloc_shared((2, num_experts), "int32")
            chunk_count = T.alloc_shared((row,), "uint16")
            chunk_counts = T.alloc_shared((max(cluster_size, 1), row), "uint16")
            first_sorted, first_pos = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            padding_start, padding_end = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            warp_sums = T.alloc_shared((2, warps), "int32")
            arrived = T.alloc_shared((1,), "uint64")

            # Numbers of pairs of this thread's expert: in the part, before it, and in all.
            count, prefix, total = (T.alloc_var("int32") for _ in range(3))
            # Of the experts up to this thread's, and of all: aligned sizes, and this part's pairs.
            sums, all_sums = T.alloc_local((2,), "int32"), T.alloc_local((2,), "int32")

            if cluster_size > 1:
                if thread == 0:
                    init_mbarrier(T.access_ptr(arrived[0], "rw"))
                T.sync_warp()
                T.cluster_arrive_relaxed()
            steps.clear(ranks, warps * num_experts // 2, threads, thread)
            if in_memory:
                steps.clear(masks, warps * num_experts, threads, thread)
            if thread < num_experts:
                counts[0, thread] = 0
                counts[1, thread] = 0
            T.sync_threads()
            if cluster_size > 1 and thread == 0:
                expect_bytes(T.access_ptr(arrived[0], "rw"), cluster_size * row * 2)

            # The thread's expert: its pairs before the part, and in all, as far as this block counts them.
            prefix = 0
            total = 0
            if cluster_size > 0:
                chunk_begin = rank * num_parts * part
                chunk_size = T.min(num_pairs - chunk_begin, num_parts * part)
                before_part = block // num_chunks * part
                steps.count_pairs(pairs, chunk_begin, chunk_size, before_part, thread, counts, threads, config.rounds)
                T.sync_threads()
                if thread < num_experts:
                    prefix = counts[0, thread]
                    total = prefix + counts[1, thread]
            if cluster_size > 1:
                if thread < num_experts:
                    chunk_count[thread] = T.cast(total, "uint16")
                T.sync_threads()
                T.cluster_wait()  # until all blocks have started and their shared memory can be written
                # Warp b sends to block b, whose mbarrier counts the bytes.
                if warp < cluster_size:
                    for j in T.unroll(ceil_div(row, 256)):
                        first = (j * 32 + lane) * 8
                        if first < row:
                            here = T.access_ptr(chunk_count[first], "r")
                            there = T.access_ptr(chunk_counts[rank, first], "w")
                            send_to_cluster(there, here, T.access_ptr(arrived[0], "rw"), warp)
            if cluster_size == 0:
                # The first launch's counts: of the blocks before this one to counts[0], of all to counts[1].
                groups = threads // num_experts  # so many threads serve an expert
                if thread < groups * num_experts:
                    before, of_all = T.alloc_var("int32"), T.alloc_var("int32")
                    before = 0
                    of_all = 0
                    for i in T.serial(T.ceildiv(num_blocks - thread // num_experts, groups)):
                        counted = T.alloc_var("int32")
                        counted = block_counts[i * groups + thread // num_experts, thread % num_experts]
                        of_all = of_all + counted
                        before = before + T.if_then_else(i * groups + thread // num_experts < block, counted, 0)
                    T.atomic_add(counts[0, thread % num_experts], before)
                    T.atomic_add(counts[1, thread % num_experts], of_all)

            runs = (begin, size, run, run_rounds)
            steps.count_run(pairs, runs, warp, lane, ranks, masks, items, run_batch, in_memory)
            T.sync_threads()
            values, segment = T.alloc_local((warps,), "int32"), T.alloc_var("int32")
            count = 0
            segment = 0  # the size of the segment of the thread's expert
            if thread < num_experts:
                # Exclusive prefix sums of `ranks` over the warps, in place.
                for w in T.unroll(warps):
                    values[w] = T.cast(ranks[w, thread], "int32")
                for w in T.unroll(warps):
                    ranks[w, thread] = T.cast(count, "uint16")
                    count = count + values[w]
            if cluster_size > 1:  # all threads wait, as nvcc makes longer code of waiting in a branch
                wait_for_cluster(T.access_ptr(arrived[0], "rw"))
            if thread < num_experts:
                if cluster_size > 1:
                    total = 0
                    for other in T.unroll(cluster_size):
                        counted = T.alloc_var("int32")
                        counted = T.cast(chunk_counts[other, thread], "int32")
                        total = total + counted
                        prefix = prefix + T.if_then_else(other < rank, counted, 0)
                elif cluster_size == 0:
                    prefix = counts[0, thread]
                    total = counts[1, thread]
                segment = total + alignment - 1
                if T.bitwise_and(alignment, alignment - 1) == 0:  # a power of two needs no division
                    segment = T.bitwise_and(segment, -alignment)
                else:
                    segment = T.truncdiv(segment, alignment) * alignment

            # Where the segments are, and the block's pairs of each expert in the sorted order.
            sums[0] = segment
            sums[1] = count
            steps.scan(warp, lane, warp_sums, sums, all_sums)
            if thread < num_experts:
                first_pos[thread] = sums[0] - segment + prefix
                first_sorted[thread] = sums[1] - count
                padding_start[thread] = sums[0] - segment + total
                padding_end[thread] = sums[0]
                if block == 0:
                    expert_start[thread] = sums[0] - segment
                    expert_end[thread] = sums[0]
                    num_tokens_per_expert[thread] = segment
                    if with_psum:
                        expert_psum[thread] = sums[0] - segment + total
            T.sync_threads()

            # -1 where no pair is: a warp an expert, and past the last segment.
            maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
            for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
                expert = (j * warps + warp) * num_blocks + block
                if expert < num_experts:
                    steps.fill(padding_start[expert] + lane, padding_end[expert], 32, maps, num_pos)
            steps.fill(all_sums[0] + block * threads + thread, num_pos, num_blocks * threads, maps, num_pos)

            # Each warp's run by expert into sorted_items, expert << _PAIR_BITS | pair, and positions of its pairs.
            pos = T.alloc_var("int32")
            for j in T.unroll(run_rounds, unroll_factor=2):
                index = T.alloc_var("int32")
                index = run + j * 32 + lane
                if index < size:
                    item, offset, expert = (T.alloc_var("int32") for _ in range(3))
                    item = items[index]
                    pos = -1
                    if item >= 0:
                        expert = item & (2**steps.EXPERT_BITS - 1)
                        offset = T.cast(ranks[warp, expert], "int32") + (item >> steps.EXPERT_BITS)
                        sorted_items[first_sorted[expert] + offset] = (expert << _PAIR_BITS) | index
                        pos = first_pos[expert] + offset
                    flat_pos[begin + index] = T.if_then_else(pos < num_pos, pos, -1)
            T.sync_threads()
            # Neighbouring threads write neighbouring positions.
            for j in T.unroll(T.ceildiv(all_sums[1], threads), unroll_factor=2):
                if j * threads + thread < all_sums[1]:
                    item, expert = (T.alloc_var("int32") for _ in range(2))
                    item = sorted_items[j * threads + thread]
                    expert = item >> _PAIR_BITS
                    pos = first_pos[expert] + j * threads + thread - first_sorted[expert]
                    if pos < num_pos:
                        pair = begin + (item & (2**_PAIR_BITS - 1))
                        pos_to_expert[pos] = expert
                        pos_to_token[pos] = pair // num_topk
                        pos_to_token_topk[pos] = pair

    return get_fused_mapping
