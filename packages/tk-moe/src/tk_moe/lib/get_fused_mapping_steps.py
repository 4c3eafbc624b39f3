"""Steps of get_fused_mapping's kernels; get_fused_mapping_kernel.py has the picture. Only kernels import this.

A pair is a token with one of its experts.
"""

from typing import Any

import tilelang.language as T

from tk_core.device.bits import atomic_or_u32
from tk_core.math import ceil_div

EXPERT_BITS = 10
"""For at most 1024 experts."""


@T.macro
def clear(x: T.Buffer, num_words: int, threads: int, thread: Any) -> None:
    """Zero so many words of shared memory, a multiple of 4."""
    words = T.view(x, (num_words,), "uint32")
    for j in T.unroll(ceil_div(num_words, threads * 4)):
        if (j * threads + thread) * 4 < num_words:
            for v in T.vectorized(4):
                words[(j * threads + thread) * 4 + v] = T.uint32(0)


@T.macro
def count_pairs(
    pairs: T.Buffer, begin: Any, size: Any, part: Any, thread: Any, counts: T.Buffer, threads: int, rounds: int
) -> None:
    """Count `size` pairs from `begin` on by expert: the first `part` of them to counts[0], the rest to counts[1]."""
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
def count_run(
    pairs: Any, runs: Any, warp: Any, lane: Any, ranks: Any, masks: Any, items: Any, run_batch: int, in_memory: bool
) -> None:
    """Count the pairs of a warp's run by expert, into `ranks`, and note each in `items`.

    `runs`: the part's first pair and its size, the offset of the warp's run in it, and the run's length / 32. A pair's
    item is its rank among those of its expert in the run, shifted by `EXPERT_BITS`, and its expert; or -1 where the
    index is that of no expert. Lanes with equal experts find each other by bits in `masks` or by a match instruction.
    """
    begin, size, run, run_rounds = runs
    indices = T.alloc_local((run_batch,), pairs.dtype)
    experts = T.alloc_local((run_batch,), "int32")
    equals = T.alloc_local((run_batch,), "uint32")
    before, lower = T.alloc_var("int32"), T.alloc_var("int32")
    bit = T.uint32(1) << T.cast(lane, "uint32")
    for batch in T.serial(T.ceildiv(run_rounds, run_batch)):
        for u in T.unroll(run_batch):
            indices[u] = T.cast(-1, pairs.dtype)
            if batch * run_batch + u < run_rounds and run + (batch * run_batch + u) * 32 + lane < size:
                indices[u] = pairs[begin + run + (batch * run_batch + u) * 32 + lane]
        for u in T.unroll(run_batch):
            is_expert = T.And(indices[u] >= 0, indices[u] < ranks.shape[1])
            experts[u] = T.if_then_else(is_expert, T.cast(indices[u], "int32"), -1)
            if not in_memory:
                equals[u] = T.match_any_sync(experts[u])
        for u in T.unroll(run_batch):
            if batch * run_batch + u < run_rounds:  # uniform in a warp
                if in_memory:
                    # A match instruction occupies the whole SM for 60 cycles where all experts differ.
                    equals[u] = T.uint32(0)
                    if experts[u] >= 0:
                        atomic_or_u32(T.access_ptr(masks[warp, experts[u]], "rw"), bit)
                    T.sync_warp()
                    if experts[u] >= 0:
                        equals[u] = masks[warp, experts[u]]
                lower = T.cast(T.popcount(equals[u] & (bit - T.uint32(1))), "int32")
                before = 0
                if experts[u] >= 0:
                    before = T.cast(ranks[warp, experts[u]], "int32")
                T.sync_warp()
                if experts[u] >= 0 and lower == 0:
                    ranks[warp, experts[u]] = T.cast(before + T.cast(T.popcount(equals[u]), "int32"), "uint16")
                    if in_memory:
                        masks[warp, experts[u]] = T.uint32(0)
                T.sync_warp()
                items[run + (batch * run_batch + u) * 32 + lane] = T.if_then_else(
                    experts[u] >= 0, ((before + lower) << EXPERT_BITS) | experts[u], -1
                )


@T.macro
def scan(warp: Any, lane: Any, warp_sums: T.Buffer, sums: T.Buffer, all_sums: T.Buffer) -> None:
    """Two inclusive prefix sums over the threads of the block, of `sums` in place; `all_sums` become the totals."""
    below, of_warp = T.alloc_var("int32"), T.alloc_var("int32")
    for step in T.unroll(5):
        for i in T.unroll(2):
            below = T.shfl_up(sums[i], 1 << step)
            sums[i] = sums[i] + T.if_then_else(lane >= (1 << step), below, 0)
    if lane == 31:
        for i in T.unroll(2):
            warp_sums[i, warp] = sums[i]
    T.sync_threads()
    for i in T.unroll(2):
        of_warp = T.if_then_else(lane < warp_sums.shape[1], warp_sums[i, lane], 0)
        all_sums[i] = T.warp_reduce_sum(of_warp)
        sums[i] = sums[i] + T.warp_reduce_sum(T.if_then_else(lane < warp, of_warp, 0))


@T.macro
def fill(first: Any, last: Any, step: Any, maps: Any, num_pos: Any) -> None:
    """Write -1 to every `step`-th position of the maps from `first` on, up to `last`."""
    pos, end = T.alloc_var("int32"), T.alloc_var("int32")
    pos = first
    end = T.min(last, num_pos)
    while pos < end:
        maps[0][pos] = -1
        maps[1][pos] = -1
        maps[2][pos] = -1
        pos = pos + step
