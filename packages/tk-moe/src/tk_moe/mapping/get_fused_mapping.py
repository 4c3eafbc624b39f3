"""get_fused_mapping: the position of each (token, slot) pair when pairs are grouped by expert, and the maps back.

Pair i = t · num_topk + k of topk_idx int64 or int32 (num_tokens, num_topk) goes to the segment of its expert. Segments
are in the order of the experts. Each has its pairs in ascending order (a stable counting sort), then padding up to a
multiple of `alignment`:

    pos               0 …                                                                  … num_expanded_tokens
                      ├── expert 0 ──┬─ padding ─┼── expert 1 ──┬─ padding ─┼── …  ─┼── padding after the last ──┤
    pos_to_expert        0 0 0 0 …      -1 …          1 1 1 …       -1 …                    -1 …

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

For more pairs than that allows (fewer where there are no clusters), a first launch writes the blocks' counts to global
memory. All sums are of integers, so the result does not depend on the number of thread blocks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_moe.device.async_copy import expect_bytes, init_mbarrier, wait_for_cluster

MAX_EXPERTS = 1024
MAX_TOPK = 32

MAX_POSITIONS = 2**30  # so that no intermediate index overflows an int32


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
    """Loads that a thread has in flight: while it counts with one launch, while it ranks in the second of two."""

    @property
    def max_pairs(self) -> int:
        """Most pairs that one launch takes; the counts of a chunk are 16-bit."""
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
        else:
            candidates.append(GetFusedMappingConfig(few_warps, 1, min(num_sms, 32), 512, 16))
        candidates += [GetFusedMappingConfig(warps, 0, 1, room, 8) for room in (4096, 2048, 512)]
        for config in candidates:
            fits = config.shared_memory_bytes(num_experts) <= arch.max_shared_memory
            if fits and (config.cluster_size == 0 or num_pairs <= config.max_pairs):
                return config
        raise AssertionError(f"no configuration of get_fused_mapping fits {arch}")

    @staticmethod
    def finds_equals_in_memory(num_experts: int) -> bool:
        """Whether lanes find equal experts by a word per warp and expert in shared memory, which fits up to 512."""
        return num_experts <= 512

    def shared_memory_bytes(self, num_experts: int) -> int:
        """Shared memory of a thread block, without the padding that aligns the arrays."""
        per_warp = 6 if self.finds_equals_in_memory(num_experts) else 2
        rows = 2 * (max(self.cluster_size, 1) + 1) * align(num_experts, 8)
        return per_warp * self.warps * num_experts + rows + 4 * (2 * self.room + 6 * num_experts + 2 * self.warps)


# Written per thread: lanes find equal experts by bits of one word, for which tiles have no operation. No tile version
# has been timed.
# All barriers are written out here, those between the lanes of a warp too.
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


@kernel(pass_configs=_PASS_CONFIGS)
def _count_kernel(
    num_experts: int, num_topk: int, idx_dtype: torch.dtype, config: GetFusedMappingConfig, arch: Arch
) -> Any:
    """The first of two launches: the number of pairs by thread block and expert."""
    import tilelang.language as T

    from tk_moe.lib import get_fused_mapping_steps as steps

    num_tokens, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_blocks")
    num_pairs = num_tokens * num_topk

    @T.prim_func
    def count_experts(
        topk_idx: T.Tensor((num_tokens, num_topk), idx_dtype),
        block_counts: T.Tensor((num_blocks, num_experts), "int32"),
    ) -> None:
        with T.Kernel(num_blocks, threads=config.warps * 32) as block:
            thread = T.get_thread_binding()
            pairs = T.view(topk_idx, (num_pairs,), idx_dtype)
            begin, size = T.alloc_var("int32"), T.alloc_var("int32")
            part = T.ceildiv(T.ceildiv(num_pairs, num_blocks), 32) * 32  # as in the second launch
            begin = block * part
            size = T.min(num_pairs - begin, part)
            counts = T.alloc_shared((1, num_experts), "int32")
            if thread < num_experts:
                counts[0, thread] = 0
            T.sync_threads()
            steps.count_pairs(pairs, begin, size, size, counts, loads=4)
            T.sync_threads()
            if thread < num_experts:
                block_counts[block, thread] = counts[0, thread]

    return count_experts


@kernel(pass_configs=_PASS_CONFIGS)
def _mapping_kernel(
    num_experts: int, num_topk: int, idx_dtype: torch.dtype, with_psum: bool, config: GetFusedMappingConfig, arch: Arch
) -> Any:
    """The whole mapping in one launch, or the second of two launches, which also takes the counts of the first.

    block_counts is None with one launch, expert_psum without `with_psum`.
    """
    import tilelang.language as T

    from tk_moe.lib import get_fused_mapping_steps as steps

    warps, cluster_size = config.warps, config.cluster_size
    row = align(num_experts, 8)  # of 16-bit counts
    num_tokens, num_pos = T.dynamic("num_tokens"), T.dynamic("num_pos")
    num_pairs = num_tokens * num_topk
    num_blocks = cluster_size * config.num_clusters or T.dynamic("num_blocks")
    num_chunks, num_parts = cluster_size or num_blocks, config.num_clusters
    in_memory = config.finds_equals_in_memory(num_experts)
    # With one launch the part has been read before, to count it, so one load in flight is enough.
    rank_loads = config.rounds if cluster_size == 0 else 1

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
        with T.Kernel(num_blocks, threads=warps * 32, cluster_dims=max(cluster_size, 1)) as block:
            thread = T.get_thread_binding()
            pairs = T.view(topk_idx, (num_pairs,), idx_dtype)
            flat_pos = T.view(token_topk_to_pos, (num_pairs,), "int32")
            maps = steps.Maps(pos_to_expert, pos_to_token, pos_to_token_topk)
            per_expert = (expert_start, expert_end, num_tokens_per_expert, expert_psum if with_psum else None)
            segments = steps.Segments(*per_expert)

            # Each block has a part of the pairs and each warp a run of that, all multiples of 32 pairs.
            begin, first, end = (T.alloc_var("int32") for _ in range(3))
            part = T.ceildiv(T.ceildiv(num_pairs, num_chunks), num_parts * 32) * 32
            run_length = T.ceildiv(part, warps * 32) * 32
            rank, cluster = block % num_chunks, block // num_chunks  # rank: of the block in its cluster
            begin = (rank * num_parts + cluster) * part
            first = thread // 32 * run_length
            end = T.min(T.min(num_pairs - begin, part), first + run_length)

            counts = T.alloc_shared((2, num_experts), "int32")  # of pairs before the part, and of the rest
            received = T.alloc_shared((cluster_size, row), "uint16") if cluster_size > 1 else None
            arrived = T.alloc_shared((1,), "uint64")
            ranks = T.alloc_shared((warps, num_experts), "uint16")
            masks = T.alloc_shared((warps, num_experts), "uint32") if in_memory else None
            items, sorted_items = (T.alloc_shared((config.room,), "int32") for _ in range(2))
            first_sorted, first_pos = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            padding_start, padding_end = (T.alloc_shared((num_experts,), "int32") for _ in range(2))
            run = steps.Run(begin, first, end, items, ranks)
            experts = steps.Experts(first_sorted, first_pos, padding_start, padding_end)

            if cluster_size > 1:
                if thread == 0:
                    init_mbarrier(T.access_ptr(arrived[0], "rw"))
                T.sync_warp()
                T.cluster_arrive_relaxed()
            # Each view has its own name: TileLang places shared memory by name, and equal names in no fixed order.
            rank_words = T.view(ranks, (warps * num_experts // 2,), "uint32")
            steps.clear(rank_words)
            if in_memory:
                mask_words = T.view(masks, (warps * num_experts,), "uint32")
                steps.clear(mask_words)
            if thread < num_experts:
                counts[0, thread] = 0
                counts[1, thread] = 0
            T.sync_threads()
            if cluster_size > 1 and thread == 0:
                expect_bytes(T.access_ptr(arrived[0], "rw"), cluster_size * row * 2)

            if cluster_size == 0:
                steps.add_block_counts(block_counts, counts)
            else:
                chunk_begin, chunk_length = rank * num_parts * part, num_parts * part
                chunk_size = T.min(num_pairs - chunk_begin, chunk_length)
                steps.count_pairs(pairs, chunk_begin, chunk_size, cluster * part, counts, config.rounds)
            if cluster_size > 1:
                T.sync_threads()
                steps.send_counts(counts, received, arrived, rank)
            steps.rank_run(pairs, run, masks, rank_loads)
            T.sync_threads()

            count = steps.sum_over_warps(ranks)
            if cluster_size > 1:  # all threads wait, as nvcc makes longer code of waiting in a branch
                wait_for_cluster(T.access_ptr(arrived[0], "rw"))
            before, total = steps.sum_over_blocks(counts, received, rank)
            used, num_sorted = steps.locate_segments(before, total, count, alignment, experts, segments)
            T.sync_threads()

            steps.fill_padding(experts, used, num_blocks, maps)
            steps.sort_run(run, experts, sorted_items, flat_pos, num_pos)
            T.sync_threads()
            steps.write_maps(begin, num_sorted, num_topk, sorted_items, experts, maps)

    return get_fused_mapping


_Mapping = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]


def _launch_mapping(topk_idx: Tensor, num_experts: int, alignment: int, with_psum: bool, outs: list[Tensor]) -> None:
    num_tokens, num_topk = topk_idx.shape
    maps, others = outs[:3], outs[3:]
    if num_tokens == 0:
        for out in maps:
            out.fill_(-1)
        for out in others:
            out.zero_()
        return
    arch = get_arch(topk_idx.device)
    num_pairs = num_tokens * num_topk
    power_of_two = 1 << (num_pairs - 1).bit_length()
    config = GetFusedMappingConfig.best(power_of_two, num_experts, get_num_sms(topk_idx.device), arch)
    block_counts = None
    if config.cluster_size == 0:
        block_counts = topk_idx.new_empty((ceil_div(num_pairs, config.room), num_experts), dtype=torch.int32)
        _count_kernel(num_experts, num_topk, topk_idx.dtype, config, arch)(topk_idx, block_counts)
    outs = outs if with_psum else [*outs, None]
    launch = _mapping_kernel(num_experts, num_topk, topk_idx.dtype, with_psum, config, arch)
    launch(topk_idx, block_counts, *outs, alignment)


@op(aligned=(), reference="mapping.get_fused_mapping.full_length")
def _get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool, with_psum: bool
) -> tuple[Tensor, ...]:
    """`get_fused_mapping` without the synchronization: all its tensors, the pos_to_* in full length."""
    num_tokens, num_topk = check.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("num_tokens", "num_topk"))
    check.in_range("num_topk (columns of topk_idx)", num_topk, 1, MAX_TOPK)
    check.in_range("num_experts", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_expanded_tokens", num_expanded_tokens, 0, MAX_POSITIONS)
    check.in_range("alignment", alignment, 1, MAX_POSITIONS)
    check.flag("force_no_sync", force_no_sync)
    check.flag("with_psum", with_psum)
    worst_case = (num_tokens * num_topk + (alignment - 1) * num_experts) // alignment * alignment
    is_small = worst_case <= MAX_POSITIONS
    check.require(is_small, "topk_idx", "at most {} positions in the worst case", worst_case, MAX_POSITIONS)
    check.below("topk_idx", topk_idx, num_experts, "indices below num_experts = {}")
    num_pos = num_expanded_tokens or worst_case
    # Three maps from positions, the map to positions, then the tensors (num_experts,).
    shapes = [(num_pos,)] * 3 + [(num_tokens, num_topk)] + [(num_experts,)] * (4 if with_psum else 3)
    outs = [new(topk_idx.new_empty, shape, dtype=torch.int32) for shape in shapes]
    if launching(outs):
        _launch_mapping(topk_idx, num_experts, alignment, with_psum, outs)
    return tuple(outs)


@overload
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: Literal[False] = False,
) -> _Mapping: ...


@overload
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: Literal[True],
) -> tuple[*_Mapping, Tensor]: ...


def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: bool = False,
) -> tuple[Any, ...]:
    """Group (token, slot) pairs by expert: each owns a segment of positions, padded to a multiple of `alignment`.

    Segments are in the order of the experts. Each has its pairs in ascending flat order t · num_topk + k, then padding;
    positions after the last segment are padding too. An index outside 0 … num_experts-1 means no expert; with
    TK_DEBUG=1, one of num_experts or more raises.

    With num_expanded_tokens = 0, the pos_to_* are allocated for the worst case, ⌊(num_tokens · num_topk +
    (alignment - 1) · num_experts) / alignment⌋ · alignment positions. Then, unless `force_no_sync`, the sizes of the
    segments are read back, which synchronizes with the device, and the pos_to_* are cut to the sum of the sizes. In all
    other cases there is no synchronization, and the call can be captured in a CUDA graph. On the meta device there are
    no sizes to read, and nothing is cut. Fake tensors, torch.compile and torch.export need a size or `force_no_sync`:
    `tk_moe.max_expanded_tokens` computes the most that any routing needs.

    Args:
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_experts: From 1 to 1024.
        num_expanded_tokens: Length of the pos_to_*; 0 for the worst case. If it is too small, pairs that do not fit
            get -1 in token_topk_to_pos; the bounds of the segments are as if they did fit.
        alignment: The size of each segment is a multiple of this; at least 1.
        force_no_sync: Keep the length of the worst case instead of synchronizing.
        with_psum: Also return expert_psum.

    Returns:
        pos_to_expert, pos_to_token, pos_to_token_topk: int32 (num_expanded_tokens). Expert, token and flat index
            t · num_topk + k of each position; -1 for padding.
        token_topk_to_pos: int32 (num_tokens, num_topk). Position of each pair, -1 if it has none.
        expert_start, expert_end: int32 (num_experts). Bounds of the segments.
        num_tokens_per_expert: int32 (num_experts). Sizes of the segments, padding included.
        num_tokens_per_expert_list: The same as a list if it was read back, otherwise empty.
        expert_psum: With `with_psum` only: int32 (num_experts). The position where the pairs of each expert end and its
            padding begins: expert_start plus the number of its pairs. For grouped matrix products that skip padding.

    Raises:
        TypeError: topk_idx is not an int64 or int32 tensor, or another argument is not an int (a bool for a flag).
        ValueError: topk_idx has another shape or is not contiguous, a size is out of range, there would be more than
            2³⁰ positions, or sizes would have to be read back from fake tensors.
    """
    reads_sizes = num_expanded_tokens == 0 and not force_no_sync
    if reads_sizes and (torch.compiler.is_compiling() or isinstance(topk_idx, FakeTensor)):
        # A fake tensor has no data from which sizes could be read back.
        size = (
            "a size, as tk_moe.max_expanded_tokens computes it, or force_no_sync, under torch.compile and fake tensors"
        )
        check.require(False, "num_expanded_tokens", size, 0)
    outs = _get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync, with_psum)
    maps, num_tokens_per_expert, psum = list(outs[:6]), outs[6], outs[7:]
    sizes: list[int] = []
    if reads_sizes and not topk_idx.is_meta:
        sizes = num_tokens_per_expert.tolist()
        used = sum(sizes)
        maps[:3] = (pos_to[:used] for pos_to in maps[:3])
    return *maps, num_tokens_per_expert, sizes, *psum
