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
from tk_core.math import align
from tk_moe.device.async_copy import expect_bytes, init_mbarrier, wait_for_cluster
from tk_moe.lib.get_fused_mapping_config import GetFusedMappingConfig

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
            first_sorted, first_pos = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            padding_start, padding_end = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            warp_sums = T.alloc_shared((2, warps), "uint32")
            arrived = T.alloc_shared((1,), "uint64")

            # Numbers of pairs of this thread's expert: in the part, before it, and in all.
            count = T.alloc_local((1,), "int32")
            prefix, total = T.alloc_var("int32"), T.alloc_var("int32")
            all_sums = T.alloc_local((2,), "int32")  # of aligned sizes; of this part's pairs

            if cluster_size > 1:
                if thread == 0:
                    init_mbarrier(T.access_ptr(arrived[0], "rw"))
                T.sync_warp()
                T.cluster_arrive_relaxed()
            steps.clear(T.view(ranks, (warps * num_experts // 2,), "uint32"), threads, thread)
            if in_memory:
                steps.clear(masks, threads, thread)
            if thread < num_experts:
                counts[0, thread] = 0
                counts[1, thread] = 0
            T.sync_threads()
            if cluster_size > 1 and thread == 0:
                expect_bytes(T.access_ptr(arrived[0], "rw"), cluster_size * row * 2)

            prefix = 0
            total = 0
            if cluster_size > 0:
                steps.count_chunk(
                    pairs,
                    rank * num_parts * part,
                    T.min(num_pairs - rank * num_parts * part, num_parts * part),
                    block // num_chunks * part,
                    thread,
                    counts,
                    config,
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
                steps.exchange_counts(chunk_count, chunk_counts, arrived, rank, warp, lane)
            if cluster_size == 0:
                steps.add_block_counts(block_counts, block, num_blocks, threads, thread, counts)

            runs = (begin, size, run, run_rounds)
            steps.count_run(pairs, runs, warp, lane, ranks, masks, items, num_experts, config)
            T.sync_threads()
            steps.offsets_of_warps(thread, ranks, num_experts, count)
            if cluster_size > 1:
                wait_for_cluster(T.access_ptr(arrived[0], "rw"))
                if thread < num_experts:
                    steps.add_cluster_counts(chunk_counts, rank, thread, prefix, total)
            if cluster_size == 0 and thread < num_experts:
                prefix = counts[0, thread]
                total = counts[1, thread]

            firsts, padding = (first_sorted, first_pos), (padding_start, padding_end)
            segments = (expert_start, expert_end, num_tokens_per_expert, expert_psum if with_psum else None)
            steps.locate_segments(
                alignment, block, thread, prefix, total, count[0], warp_sums, all_sums, firsts, padding, segments
            )
            T.sync_threads()

            maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
            steps.fill_padding(block, num_blocks, warps, thread, padding, all_sums[0], maps, num_pos)
            steps.sort_run(runs, warp, lane, items, ranks, firsts, sorted_items, flat_pos, num_pos)
            T.sync_threads()
            steps.write_positions(begin, all_sums[1], thread, threads, num_topk, sorted_items, firsts, maps, num_pos)

    return get_fused_mapping
