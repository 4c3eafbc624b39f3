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

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_moe.device.async_copy import bulk_store_to_cluster


@dataclass(frozen=True)
class GetFusedMappingConfig:
    """How the pairs are distributed over thread blocks."""

    warps: int
    """Warps of a thread block, which has at least one thread per expert."""
    cluster_size: int
    """Thread blocks of a cluster; 0 for two launches with any number of thread blocks."""
    num_clusters: int
    """Number of clusters, each of which counts all pairs."""
    room: int
    """Pairs that fit in a thread block's shared memory."""
    rounds: int
    """Loads that a thread has in flight while it counts a chunk."""

    @property
    def max_pairs(self) -> int:
        """Most pairs of one launch; a chunk's counts have 16 bits."""
        return self.cluster_size * min(self.num_clusters * self.room, 2**16 - 32 * self.num_clusters)

    @staticmethod
    @cache
    def best(num_pairs: int, num_experts: int, num_sms: int, arch: Arch) -> "GetFusedMappingConfig":
        """The configuration for `num_pairs` pairs, rounded up to a power of two, on `num_sms` SMs."""
        # Fewer warps are faster, but every expert needs a thread. For few pairs a cluster's barrier costs too much.
        warps = 16 if num_experts <= 512 else 32
        few_warps = 8 if num_experts <= 256 else warps
        candidates = [GetFusedMappingConfig(few_warps, 1, min(num_sms, 32), 128, 16)]
        if arch.sm >= 90 and num_sms >= 8:
            # More clusters would repeat the counting more often, and some of their blocks would share an SM.
            num_clusters = min(num_sms // 8, 8)
            rounds = 8 if num_pairs <= 32768 else 16
            candidates.append(GetFusedMappingConfig(warps, 8, num_clusters, 2048, rounds))
        candidates += [GetFusedMappingConfig(warps, 0, 1, room, 8) for room in (4096, 2048, 512)]
        for config in candidates:
            fits = config.shared_memory_bytes(num_experts) <= arch.max_shared_memory
            if fits and (config.cluster_size == 0 or num_pairs <= config.max_pairs):
                return config
        raise AssertionError(f"no configuration of get_fused_mapping fits {arch}")

    @staticmethod
    def finds_equals_in_memory(num_experts: int) -> bool:
        """Whether a warp finds lanes with equal experts by a word per expert in shared memory, as fits up to 512."""
        return num_experts <= 512

    def shared_memory_bytes(self, num_experts: int) -> int:
        """Shared memory of a thread block, without the padding that aligns the arrays."""
        per_warp = 6 if self.finds_equals_in_memory(num_experts) else 2
        rows = 2 * (max(self.cluster_size, 1) + 1) * align(num_experts, 8)
        return per_warp * self.warps * num_experts + rows + 4 * (2 * self.room + 6 * num_experts + 2 * self.warps)


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
            counts = T.alloc_shared((2, num_experts), "int32")
            if thread < num_experts:
                counts[1, thread] = 0
            T.sync_threads()
            size = T.min(num_pairs - block * chunk, chunk)
            steps.count_chunk(pairs, block * chunk, size, 0, counts, threads, config.rounds)
            T.sync_threads()
            if thread < num_experts:
                block_counts[block, thread] = counts[1, thread]

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
            run = thread // 32 * run_length
            run_rounds = T.ceildiv(T.max(T.min(size - run, run_length), 0), 32)

            ranks = T.alloc_shared((warps * num_experts,), "uint16")
            masks = T.alloc_shared((warps * num_experts if in_memory else 4,), "uint32")
            items, sorted_items = T.alloc_shared((config.room,), "int32"), T.alloc_shared((config.room,), "int32")
            counts = T.alloc_shared((2, num_experts), "int32")
            chunk_count = T.alloc_shared((row,), "uint16")
            chunk_counts = T.alloc_shared((max(cluster_size, 1), row), "uint16")
            first_sorted, first_pos = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            padding_start, padding_end = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            warp_sums = T.alloc_shared((2, warps), "uint32")

            # Numbers of pairs of this thread's expert: in the part, before it, and in all.
            count = T.alloc_local((1,), "int32")
            prefix, total = T.alloc_var("int32"), T.alloc_var("int32")
            all_sums = T.alloc_local((2,), "int32")  # of aligned sizes; of this part's pairs

            if cluster_size > 1:
                arrived = T.alloc_barrier(cluster_size)
                T.cluster_arrive_relaxed()
            steps.clear(T.view(ranks, (warps * num_experts // 2,), "uint32"), threads)
            if in_memory:
                steps.clear(masks, threads)
            if thread < num_experts:
                counts[0, thread] = 0
                counts[1, thread] = 0
            T.sync_threads()

            prefix = 0
            total = 0
            if cluster_size > 0:
                chunk_begin, chunk_size = rank * num_parts * part, num_parts * part
                size_here, before = T.min(num_pairs - chunk_begin, chunk_size), block // num_chunks * part
                steps.count_chunk(pairs, chunk_begin, size_here, before, counts, threads, config.rounds)
                T.sync_threads()
                if thread < num_experts:
                    prefix = counts[0, thread]
                    total = prefix + counts[1, thread]
            if cluster_size > 1:
                if thread < num_experts:
                    chunk_count[thread] = T.cast(total, "uint16")
                T.sync_threads()
                T.cluster_wait()  # until all blocks have started and their shared memory can be written
                if thread % 32 == 0 and thread // 32 < cluster_size:  # warp b sends the counts to block b
                    there, here = T.access_ptr(chunk_counts[rank, 0], "w"), T.access_ptr(chunk_count[0], "r")
                    bulk_store_to_cluster(there, here, thread // 32, 2 * row, arrived[0])
            if cluster_size == 0:
                steps.add_block_counts(block_counts, block, num_blocks, threads, counts)

            runs = (begin, size, run, run_rounds)
            steps.count_run(pairs, runs, ranks, masks, items, num_experts, in_memory)
            T.sync_threads()
            steps.offsets_of_warps(ranks, num_experts, count)
            if cluster_size > 1:
                T.mbarrier_wait_parity(arrived, 0)
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

            firsts, padding = (first_sorted, first_pos), (padding_start, padding_end)
            segments = (expert_start, expert_end, num_tokens_per_expert, expert_psum if with_psum else None)
            numbers = prefix, total, count[0]
            steps.locate_segments(alignment, block, numbers, warp_sums, all_sums, firsts, padding, segments)
            T.sync_threads()

            maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
            steps.fill_padding(block, num_blocks, warps, padding, all_sums[0], maps, num_pos)
            steps.sort_run(runs, items, ranks, firsts, sorted_items, flat_pos, num_pos)
            T.sync_threads()
            steps.write_positions(begin, all_sums[1], threads, num_topk, sorted_items, firsts, maps, num_pos)

    return get_fused_mapping
