"""get_fused_mapping: where each (token, slot) pair goes when pairs are grouped by expert, and back.

Pair i = t · num_topk + k of topk_idx int64 (num_tokens, num_topk) goes to the segment of its expert. Segments follow
the order of the experts; in each stand its pairs in ascending order (a stable counting sort), then padding up to a
multiple of `alignment`:

    pos               0 …                                                                  … num_expanded_tokens
                      ├── expert 0 ──┬─ padding ─┼── expert 1 ──┬─ padding ─┼── …  ─┼── padding after the last ──┤
    pos_to_expert        0 0 0 0 …      -1 …          1 1 1 …       -1 …                    -1 …

A block takes a chunk of consecutive pairs, each of its warps a run of consecutive pairs of that:

    1. A warp counts its run by expert in shared memory, 32 pairs at a time; lanes with equal experts find each other
       by setting their bits in one word. What a pair finds there is its rank within the run.
    2. Sums over the warps before give each warp's offset, sums over the blocks before each block's. A sum over the
       experts before, of the aligned sizes, gives the segments.
    3. token_topk_to_pos is written in the order of the pairs; the pos_to_* in the order of the experts, which shared
       memory holds by then, so that writes of neighbouring lanes are neighbours.

How blocks learn each other's counts depends on how many pairs there are (`GetFusedMappingConfig.best`): one block needs
nothing; a cluster of blocks reads them in each other's shared memory; beyond that, and where there are no clusters, a
launch before leaves them in global memory. Every sum is of integers, so nothing depends on the number of blocks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable

MAX_EXPERTS = 1024
MAX_TOPK = 32

MAX_POSITIONS = 2**30  # so that no index on the way overflows an int32

_EXPERT_BITS = 10  # of MAX_EXPERTS
_PAIR_BITS = 16  # of a pair's number within its chunk

# One element of a neighbour's shared memory; its address there is this block's with the neighbour's rank in it.
_LOAD_FROM_CLUSTER = """
__device__ __forceinline__ int tk_load_from_cluster(const int* pointer, int rank) {
  unsigned int here = static_cast<unsigned int>(__cvta_generic_to_shared(pointer)), there;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}
"""


@dataclass(frozen=True, eq=False)
class GetFusedMappingConfig:
    """How the pairs are dealt out to blocks."""

    warps: int
    """Warps of a block; it has a thread for every expert."""
    cluster_size: int
    """Blocks of the one cluster that does it all; 0 if any number of blocks does it in two launches."""
    chunk: int
    """Pairs that a block has room for in shared memory."""

    rounds = 8
    """Loads of 32 pairs that a warp has under way at a time."""

    @staticmethod
    @cache
    def best(num_pairs: int, num_experts: int, num_sms: int, arch: Arch) -> "GetFusedMappingConfig":
        """The configuration for `num_pairs` pairs, rounded up to a power of two, on `num_sms` SMs."""
        # 16 warps beat 32 by 0.5 to 0.9 µs up to 8192 x 8 pairs on an H200; there is a thread for every expert.
        warps = 16 if num_experts <= 512 else 32
        candidates = [GetFusedMappingConfig(warps, 1, 4096)]
        if arch.sm >= 90:
            candidates = [GetFusedMappingConfig(warps, 8, 2048), GetFusedMappingConfig(warps, 8, 8192), *candidates]
            # The blocks of a cluster share a GPC, and of 8 GPCs with more than 120 multiprocessors one has 16.
            if arch.sm in (90, 100, 103) and num_sms > 120:
                candidates = [GetFusedMappingConfig(warps, 16, 8192)]
        candidates += [GetFusedMappingConfig(warps, 0, chunk) for chunk in (4096, 2048, 512)]
        for config in candidates:
            room = config.cluster_size * config.chunk if config.cluster_size else num_pairs
            fits = config.shared_memory_bytes(num_experts) <= arch.max_shared_memory
            if fits and config.cluster_size <= num_sms and num_pairs <= room:
                return config
        raise AssertionError(f"no configuration of get_fused_mapping fits {arch}")

    @staticmethod
    def finds_equals_in_memory(num_experts: int) -> bool:
        """Whether a warp has a word for each expert in shared memory; more than 512 would not leave enough of it."""
        return num_experts <= 512

    def shared_memory_bytes(self, num_experts: int) -> int:
        """Shared memory of a block, up to what aligning the arrays adds."""
        per_warp = 6 if self.finds_equals_in_memory(num_experts) else 2
        return per_warp * self.warps * num_experts + 4 * (2 * self.chunk + 7 * num_experts + 2 * self.warps)


def _expert_of(index: Any, num_experts: int) -> Any:
    """An int64 index as an int32, -1 if it is none of an expert."""
    import tilelang.language as T

    return T.if_then_else(T.And(index >= 0, index < num_experts), T.cast(index, "int32"), -1)


# The order of shared memory is kept by the barriers that are written out here, between the lanes of a warp too.
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


@kernel(pass_configs=_PASS_CONFIGS)
def _count_kernel(num_experts: int, num_topk: int, config: GetFusedMappingConfig, arch: Arch) -> Any:
    """The first of two launches: how many pairs of each expert a block has."""
    import tilelang.language as T

    threads, rounds = config.warps * 32, 4
    num_tokens, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_blocks")

    @T.prim_func
    def count_experts(
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"), block_counts: T.Tensor((num_blocks, num_experts), "int32")
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            num_pairs = num_tokens * num_topk
            pairs = T.view(topk_idx, (num_tokens * num_topk,), "int64")
            chunk = T.ceildiv(T.ceildiv(num_pairs, num_blocks), 32) * 32  # as in the second launch
            counts = T.alloc_shared((num_experts,), "int32")
            indices = T.alloc_local((rounds,), "int64")
            if thread < num_experts:
                counts[thread] = 0
            T.sync_threads()
            for batch in T.serial(T.ceildiv(chunk, threads * rounds)):
                for u in T.unroll(rounds):
                    index = (batch * rounds + u) * threads + thread
                    indices[u] = T.int64(-1)
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
def _mapping_kernel(num_experts: int, num_topk: int, config: GetFusedMappingConfig, arch: Arch) -> Any:
    """All of the mapping, or the second of two launches, which takes the counts of the first as well."""
    import tilelang.language as T

    warps, rounds, cluster_size = config.warps, config.rounds, config.cluster_size
    threads = warps * 32
    groups = threads // num_experts  # of threads that add up blocks' counts together
    num_tokens, num_pos = T.dynamic("num_tokens"), T.dynamic("num_pos")
    num_blocks = cluster_size or T.dynamic("num_blocks")
    in_memory = config.finds_equals_in_memory(num_experts)
    expert_mask = 2**_EXPERT_BITS - 1
    pair_mask = 2**_PAIR_BITS - 1

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
        """Of a warp's run: the number of pairs by expert in `ranks`, and each pair's expert and rank in `items`."""
        indices = T.alloc_local((rounds,), "int64")
        experts = T.alloc_local((rounds,), "int32")
        equals = T.alloc_local((rounds,), "uint32")
        before = T.alloc_var("int32")
        lower = T.alloc_var("int32")
        for j in T.serial(ceil_div(num_experts, 32)):
            if j * 32 + lane < num_experts:
                ranks[warp, j * 32 + lane] = T.cast(0, "uint16")
                if in_memory:
                    masks[warp, j * 32 + lane] = T.uint32(0)
        T.sync_warp()
        for batch in T.serial(T.ceildiv(run_rounds, rounds)):
            for u in T.unroll(rounds):
                indices[u] = T.int64(-1)
                if batch * rounds + u < run_rounds and run + (batch * rounds + u) * 32 + lane < size:
                    indices[u] = pairs[begin + run + (batch * rounds + u) * 32 + lane]
            for u in T.unroll(rounds):
                experts[u] = _expert_of(indices[u], num_experts)
                if not in_memory:
                    equals[u] = T.match_any_sync(experts[u])
            for u in T.unroll(rounds):
                if batch * rounds + u < run_rounds:  # the same for a whole warp
                    if in_memory:
                        # A match instruction takes 60 cycles of the whole multiprocessor where all experts differ.
                        equals[u] = T.uint32(0)
                        if experts[u] >= 0:
                            T.call_extern(
                                "uint32",
                                "atomicOr",
                                T.access_ptr(masks[warp, experts[u]], "rw"),
                                T.uint32(1) << T.cast(lane, "uint32"),
                            )
                        T.sync_warp()
                        if experts[u] >= 0:
                            equals[u] = masks[warp, experts[u]]
                    lower = T.cast(
                        T.popcount(equals[u] & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))), "int32"
                    )
                    before = 0
                    if experts[u] >= 0:
                        before = T.cast(ranks[warp, experts[u]], "int32")
                    T.sync_warp()
                    if experts[u] >= 0 and lower == 0:
                        ranks[warp, experts[u]] = T.cast(before + T.cast(T.popcount(equals[u]), "int32"), "uint16")
                        if in_memory:
                            masks[warp, experts[u]] = T.uint32(0)
                    T.sync_warp()
                    items[run + (batch * rounds + u) * 32 + lane] = T.if_then_else(
                        experts[u] >= 0, ((before + lower) << _EXPERT_BITS) | experts[u], -1
                    )

    @T.macro
    def offsets_of_warps(thread: T.int32, ranks: T.Buffer, count: T.Buffer) -> None:
        """Counts of the warps become the sums over the warps before, `count` the sum over all."""
        values = T.alloc_local((warps,), "int32")
        count[0] = 0
        if thread < num_experts:
            for w in T.unroll(warps):
                values[w] = T.cast(ranks[w, thread], "int32")
            for w in T.unroll(warps):
                ranks[w, thread] = T.cast(count[0], "uint16")
                count[0] = count[0] + values[w]

    @T.macro
    def fill_padding(
        first: T.int32,
        last: T.int32,
        index: T.int32,
        step: T.int32,
        pos_to_expert: T.Buffer,
        pos_to_token: T.Buffer,
        pos_to_token_topk: T.Buffer,
    ) -> None:
        # Short as code rather than fast: it runs once or twice.
        for i in T.unroll(T.ceildiv(T.max(T.min(last, num_pos) - first, 0), step), unroll_factor=1):
            if first + i * step + index < T.min(last, num_pos):
                pos_to_expert[first + i * step + index] = -1
                pos_to_token[first + i * step + index] = -1
                pos_to_token_topk[first + i * step + index] = -1

    @T.macro
    def mapping(
        block: T.int32,
        alignment: T.int32,
        topk_idx: T.Buffer,
        pos_to_expert: T.Buffer,
        pos_to_token: T.Buffer,
        pos_to_token_topk: T.Buffer,
        token_topk_to_pos: T.Buffer,
        expert_start: T.Buffer,
        expert_end: T.Buffer,
        num_tokens_per_expert: T.Buffer,
        block_counts: Any,
    ) -> None:
        thread = T.get_thread_binding()
        warp, lane = thread // 32, thread % 32
        num_pairs = num_tokens * num_topk
        pairs = T.view(topk_idx, (num_tokens * num_topk,), "int64")
        flat_pos = T.view(token_topk_to_pos, (num_tokens * num_topk,), "int32")
        # Whole rounds of 32 pairs: a chunk for each block, a run of that for each warp. A variable is worked out once.
        begin, size = T.alloc_var("int32"), T.alloc_var("int32")  # of the chunk
        run, run_rounds = T.alloc_var("int32"), T.alloc_var("int32")  # where it begins in the chunk; its length / 32
        chunk = T.ceildiv(T.ceildiv(num_pairs, num_blocks), 32) * 32
        run_length = T.ceildiv(chunk, threads) * 32
        begin = block * chunk
        size = T.max(T.min(num_pairs - begin, chunk), 0)
        run = warp * run_length
        run_rounds = T.ceildiv(T.max(T.min(size - run, run_length), 0), 32)

        ranks = T.alloc_shared((warps, num_experts), "uint16")
        masks = T.alloc_shared((warps, num_experts) if in_memory else (1, 1), "uint32")
        items = T.alloc_shared((config.chunk,), "int32")
        sorted_items = T.alloc_shared((config.chunk,), "int32")
        block_count = T.alloc_shared((num_experts,), "int32")
        all_count = T.alloc_shared((num_experts,), "int32")
        before_count = T.alloc_shared((num_experts,), "int32")
        first_pos = T.alloc_shared((num_experts,), "int32")
        first_sorted = T.alloc_shared((num_experts,), "int32")
        padding_start = T.alloc_shared((num_experts,), "int32")
        padding_end = T.alloc_shared((num_experts,), "int32")
        warp_sums = T.alloc_shared((2, warps), "int32")

        count = T.alloc_local((1,), "int32")
        total = T.alloc_var("int32")
        prefix = T.alloc_var("int32")
        pos = T.alloc_var("int32")
        sums = T.alloc_local((2,), "int32")  # of aligned sizes; of this block's pairs
        shifted = T.alloc_local((2,), "int32")

        count_run(pairs, begin, size, run, run_rounds, warp, lane, ranks, masks, items)
        T.sync_threads()
        offsets_of_warps(thread, ranks, count)

        # Of this thread's expert: pairs in all blocks, and in those before.
        total = count[0]
        prefix = 0
        if cluster_size > 1:
            if thread < num_experts:
                block_count[thread] = count[0]
            T.sync_warp()  # all its lanes have to come to a cluster's barrier together
            T.cluster_sync()
            if thread < num_experts:
                total = 0
                for other in T.unroll(cluster_size):
                    counted = T.alloc_var("int32")
                    counted = T.call_extern(
                        "int32", "tk_load_from_cluster", T.access_ptr(block_count[thread], "r"), other
                    )
                    total = total + counted
                    prefix = prefix + T.if_then_else(other < block, counted, 0)
        if cluster_size == 0:
            if thread < num_experts:
                all_count[thread] = 0
                before_count[thread] = 0
            T.sync_threads()
            if thread < groups * num_experts:
                total = 0
                for i in T.serial(T.ceildiv(num_blocks - thread // num_experts, groups)):
                    counted = T.alloc_var("int32")
                    counted = block_counts[i * groups + thread // num_experts, thread % num_experts]
                    total = total + counted
                    prefix = prefix + T.if_then_else(i * groups + thread // num_experts < block, counted, 0)
                T.atomic_add(all_count[thread % num_experts], total)
                T.atomic_add(before_count[thread % num_experts], prefix)
            T.sync_threads()
            if thread < num_experts:
                total = all_count[thread]
                prefix = before_count[thread]

        size_of_segment = T.alloc_var("int32")
        size_of_segment = 0
        if thread < num_experts:
            size_of_segment = T.truncdiv(total + alignment - 1, alignment) * alignment
        sums[0] = size_of_segment
        sums[1] = count[0]
        for step in T.unroll(5):
            for i in T.unroll(2):
                shifted[i] = T.shfl_up(sums[i], 1 << step)
            for i in T.unroll(2):
                sums[i] = sums[i] + T.if_then_else(lane >= (1 << step), shifted[i], 0)
        if lane == 31:
            for i in T.unroll(2):
                warp_sums[i, warp] = sums[i]
        T.sync_threads()
        used_pos = T.alloc_var("int32")
        used_sorted = T.alloc_var("int32")
        for i in T.unroll(2):
            shifted[i] = 0
            if lane < warps:
                shifted[i] = warp_sums[i, lane]
            sums[i] = sums[i] + T.warp_reduce_sum(T.if_then_else(lane < warp, shifted[i], 0))
        used_pos = T.warp_reduce_sum(shifted[0])
        used_sorted = T.warp_reduce_sum(shifted[1])
        if thread < num_experts:
            first_pos[thread] = sums[0] - size_of_segment + prefix
            first_sorted[thread] = sums[1] - count[0]
            padding_start[thread] = sums[0] - size_of_segment + total
            padding_end[thread] = sums[0]
            if block == 0:
                expert_start[thread] = sums[0] - size_of_segment
                expert_end[thread] = sums[0]
                num_tokens_per_expert[thread] = size_of_segment
        T.sync_threads()
        if cluster_size > 1:
            # This block has read the others' counts, and waits at the end until they have read its own.
            T.cluster_arrive_relaxed()

        for j in T.unroll(T.ceildiv(num_experts, num_blocks * warps), unroll_factor=1):
            expert = (j * warps + warp) * num_blocks + block
            if expert < num_experts:
                fill_padding(
                    padding_start[expert], padding_end[expert], lane, 32, pos_to_expert, pos_to_token, pos_to_token_topk
                )
        fill_padding(
            used_pos,
            num_pos,
            block * threads + thread,
            num_blocks * threads,
            pos_to_expert,
            pos_to_token,
            pos_to_token_topk,
        )

        for j in T.unroll(run_rounds, unroll_factor=2):
            index = T.alloc_var("int32")
            index = run + j * 32 + lane
            if index < size:
                item = T.alloc_var("int32")
                offset = T.alloc_var("int32")
                item = items[index]
                pos = -1
                if item >= 0:
                    offset = T.cast(ranks[warp, item & expert_mask], "int32") + (item >> _EXPERT_BITS)
                    sorted_items[first_sorted[item & expert_mask] + offset] = (
                        (item & expert_mask) << _PAIR_BITS
                    ) | index
                    pos = first_pos[item & expert_mask] + offset
                flat_pos[begin + index] = T.if_then_else(pos < num_pos, pos, -1)
        T.sync_threads()

        for j in T.unroll(T.ceildiv(used_sorted, threads), unroll_factor=2):
            if j * threads + thread < used_sorted:
                item = T.alloc_var("int32")
                item = sorted_items[j * threads + thread]
                pos = first_pos[item >> _PAIR_BITS] + j * threads + thread - first_sorted[item >> _PAIR_BITS]
                if pos < num_pos:
                    pos_to_expert[pos] = item >> _PAIR_BITS
                    pos_to_token[pos] = (begin + (item & pair_mask)) // num_topk
                    pos_to_token_topk[pos] = begin + (item & pair_mask)
        if cluster_size > 1:
            T.sync_warp()
            T.cluster_wait()

    if cluster_size:

        @T.prim_func
        def get_fused_mapping(
            topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
            pos_to_expert: T.Tensor((num_pos,), "int32"),
            pos_to_token: T.Tensor((num_pos,), "int32"),
            pos_to_token_topk: T.Tensor((num_pos,), "int32"),
            token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
            expert_start: T.Tensor((num_experts,), "int32"),
            expert_end: T.Tensor((num_experts,), "int32"),
            num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
            alignment: T.int32,
        ) -> None:
            prelude = _LOAD_FROM_CLUSTER if cluster_size > 1 else None
            with T.Kernel(cluster_size, threads=threads, cluster_dims=cluster_size, prelude=prelude) as block:
                mapping(
                    block,
                    alignment,
                    topk_idx,
                    pos_to_expert,
                    pos_to_token,
                    pos_to_token_topk,
                    token_topk_to_pos,
                    expert_start,
                    expert_end,
                    num_tokens_per_expert,
                    None,
                )

        return get_fused_mapping

    @T.prim_func
    def get_fused_mapping_of_blocks(
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
        pos_to_expert: T.Tensor((num_pos,), "int32"),
        pos_to_token: T.Tensor((num_pos,), "int32"),
        pos_to_token_topk: T.Tensor((num_pos,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        expert_start: T.Tensor((num_experts,), "int32"),
        expert_end: T.Tensor((num_experts,), "int32"),
        num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        alignment: T.int32,
        block_counts: T.Tensor((num_blocks, num_experts), "int32"),
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            mapping(
                block,
                alignment,
                topk_idx,
                pos_to_expert,
                pos_to_token,
                pos_to_token_topk,
                token_topk_to_pos,
                expert_start,
                expert_end,
                num_tokens_per_expert,
                block_counts,
            )

    return get_fused_mapping_of_blocks


def _check_indices(topk_idx: torch.Tensor, num_experts: int) -> None:
    """What TK_DEBUG asks for. A stream that is being captured can't be waited for, so nothing is checked there."""
    if topk_idx.numel() == 0 or topk_idx.is_meta or (topk_idx.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    highest = int(topk_idx.max())
    check.require(highest < num_experts, "topk_idx", f"indices below num_experts = {num_experts}", highest)


def _get_fused_mapping_reference(
    topk_idx: torch.Tensor,
    pos_to_expert: torch.Tensor,
    pos_to_token: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    expert_start: torch.Tensor,
    expert_end: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    alignment: int,
) -> None:
    from tk_moe.reference.get_fused_mapping import get_fused_mapping

    num_experts = expert_start.shape[0]
    if env.debug():
        _check_indices(topk_idx, num_experts)
    *values, _ = get_fused_mapping(topk_idx, num_experts, pos_to_expert.shape[0], alignment, True)
    outs = (pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos)
    for out, value in zip((*outs, expert_start, expert_end, num_tokens_per_expert), values, strict=True):
        out.copy_(value)


@op(
    "tk_moe::get_fused_mapping_out",
    mutates=(
        "pos_to_expert",
        "pos_to_token",
        "pos_to_token_topk",
        "token_topk_to_pos",
        "expert_start",
        "expert_end",
        "num_tokens_per_expert",
    ),
    reference=_get_fused_mapping_reference,
)
def _get_fused_mapping_out(
    topk_idx: torch.Tensor,
    pos_to_expert: torch.Tensor,
    pos_to_token: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    expert_start: torch.Tensor,
    expert_end: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    alignment: int,
) -> None:
    num_tokens, num_topk = topk_idx.shape
    num_experts = expert_start.shape[0]
    maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
    per_expert = (expert_start, expert_end, num_tokens_per_expert)
    if num_tokens == 0:
        for out in maps:
            out.fill_(-1)
        for out in per_expert:
            out.zero_()
        return
    if env.debug():
        _check_indices(topk_idx, num_experts)
    arch = get_arch(topk_idx.device)
    num_pairs = num_tokens * num_topk
    power_of_two = 1 << (num_pairs - 1).bit_length()
    config = GetFusedMappingConfig.best(power_of_two, num_experts, get_num_sms(topk_idx.device), arch)
    launch = _mapping_kernel(num_experts, num_topk, config, arch)
    if config.cluster_size:
        launch(topk_idx, *maps, token_topk_to_pos, *per_expert, alignment)
        return
    block_counts = expert_start.new_empty((ceil_div(num_pairs, config.chunk), num_experts))
    _count_kernel(num_experts, num_topk, config, arch)(topk_idx, block_counts)
    launch(topk_idx, *maps, token_topk_to_pos, *per_expert, alignment, block_counts)


@replayable
def _map_all(
    topk_idx: torch.Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool
) -> tuple[torch.Tensor, ...]:
    """Everything but the synchronization: all tensors of `get_fused_mapping`, the pos_to_* uncut."""
    num_tokens, num_topk = check.tensor("topk_idx", topk_idx, (torch.int64,), ("num_tokens", "num_topk"))
    check.in_range("num_topk (columns of topk_idx)", num_topk, 1, MAX_TOPK)
    check.in_range("num_experts", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_expanded_tokens", num_expanded_tokens, 0, MAX_POSITIONS)
    check.in_range("alignment", alignment, 1, MAX_POSITIONS)
    check.require_type(isinstance(force_no_sync, bool), "force_no_sync", "a bool", force_no_sync)
    worst_case = (num_tokens * num_topk + (alignment - 1) * num_experts) // alignment * alignment
    check.require(
        worst_case <= MAX_POSITIONS, "topk_idx", f"at most {MAX_POSITIONS} positions in the worst case", worst_case
    )
    num_pos = num_expanded_tokens or worst_case
    pos_to_expert = topk_idx.new_empty((num_pos,), dtype=torch.int32)
    pos_to_token = topk_idx.new_empty((num_pos,), dtype=torch.int32)
    pos_to_token_topk = topk_idx.new_empty((num_pos,), dtype=torch.int32)
    token_topk_to_pos = topk_idx.new_empty((num_tokens, num_topk), dtype=torch.int32)
    expert_start = topk_idx.new_empty((num_experts,), dtype=torch.int32)
    expert_end = topk_idx.new_empty((num_experts,), dtype=torch.int32)
    num_tokens_per_expert = topk_idx.new_empty((num_experts,), dtype=torch.int32)
    _get_fused_mapping_out(
        topk_idx,
        pos_to_expert,
        pos_to_token,
        pos_to_token_topk,
        token_topk_to_pos,
        expert_start,
        expert_end,
        num_tokens_per_expert,
        alignment,
    )
    return (
        pos_to_expert,
        pos_to_token,
        pos_to_token_topk,
        token_topk_to_pos,
        expert_start,
        expert_end,
        num_tokens_per_expert,
    )


def get_fused_mapping(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    list[int],
]:
    """Group (token, slot) pairs by expert: each expert owns a segment of positions whose size `alignment` divides.

    Segments follow the order of the experts. In each stand its pairs in ascending flat order t · num_topk + k, then
    padding; what comes after the last segment is padding too. An index that is negative, or not below `num_experts`,
    means no expert; with TK_DEBUG=1 the latter raises.

    With num_expanded_tokens = 0, space for the worst case is set aside: ⌊(T·K + (alignment - 1)·E) / alignment⌋ ·
    alignment positions. Then, unless `force_no_sync`, the sizes of the segments are read back, which waits for the
    device, and the pos_to_* are cut to their sum. In all other cases nothing waits, and a CUDA graph can hold the call.
    Tensors on the meta device hold no sizes to read, and are not cut.

    Args:
        topk_idx: int64 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_experts: From 1 to 1024.
        num_expanded_tokens: Length of the pos_to_*; 0 for the worst case. If it is too small, pairs that do not fit
            get -1 in token_topk_to_pos; the segments' bounds are as if they did.
        alignment: What the size of each segment is a multiple of, at least 1.
        force_no_sync: Keep the worst case's length rather than wait.

    Returns:
        pos_to_expert, pos_to_token, pos_to_token_topk: int32 (num_expanded_tokens). Expert, token and flat index
            t · num_topk + k of each position; -1 for padding.
        token_topk_to_pos: int32 (num_tokens, num_topk). Position of each pair, -1 if it has none.
        expert_start, expert_end: int32 (num_experts). Bounds of the segments.
        num_tokens_per_expert: int32 (num_experts). Sizes of the segments, padding included.
        num_tokens_per_expert_list: The same as a list if it was read back, else empty.

    Raises:
        TypeError: topk_idx is not an int64 tensor, or another argument is not an int (a bool for force_no_sync).
        ValueError: topk_idx has another shape or is not contiguous, a size is out of range, or there would be more than
            2³⁰ positions.
    """
    *maps, num_tokens_per_expert = _map_all(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync)
    sizes: list[int] = []
    if num_expanded_tokens == 0 and not force_no_sync and not topk_idx.is_meta:
        sizes = num_tokens_per_expert.tolist()
        used = sum(sizes)
        maps[:3] = (pos_to[:used] for pos_to in maps[:3])
    return *maps, num_tokens_per_expert, sizes
