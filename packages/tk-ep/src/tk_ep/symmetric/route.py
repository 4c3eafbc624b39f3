"""What a source knows of its own pairs of a token and a slot: the first kernel of a dispatch without a handle.

Thread blocks have consecutive parts of the tokens. A block counts the pairs of each expert, and the tokens for each
rank, in the parts before its own; then it goes through its own part in groups of at most 256 pairs, in which warps
count one after the other. It also copies its part of topk_idx, for the handle. The last block has counted all, and
tells each rank what it will get: so ranks know where rows belong while rows are on their way.
"""

from typing import Any, NamedTuple

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes

THREADS = 256
_LOADS = 32
"""Experts of earlier tokens that a thread loads at once."""


def group_tokens(num_topk: int) -> int:
    """Tokens of a group of pairs."""
    return THREADS // num_topk


def parts(num_tokens: int, num_topk: int, num_sms: int) -> tuple[int, int]:
    """(thread blocks, groups of each)."""
    num_groups = max(1, ceil_div(num_tokens, group_tokens(num_topk)))
    groups_each = ceil_div(num_groups, num_sms)
    return ceil_div(num_groups, groups_each), groups_each


class Numbers(NamedTuple):
    """Run-time numbers of route."""

    num_tokens: int
    first_dst_slot: int
    max_index: int
    """Ranks among an expert's pairs are at most this"""
    num_blocks: int
    groups_each: int


@kernel(pass_configs=PASS_CONFIGS)
def route_kernel(sizes: Sizes, idx_dtype: torch.dtype, copies_idx: bool, arch: Arch) -> Any:
    """Write `slots` and `dst_slots` (memory.TokenRow; EPHandle.dst_buffer_slot_idx), and the counts at all ranks."""
    import tilelang.language as T

    from tk_ep.device.system import load_relaxed, tell
    from tk_ep.symmetric import arguments, flags, memory

    num_ranks, num_experts, num_topk = sizes
    num_local, num_counts = sizes.num_local_experts, num_experts + num_ranks
    per_group = group_tokens(num_topk)
    at_once = max(1, _LOADS // num_topk)

    def expert_of(index: T.PrimExpr) -> T.PrimExpr:
        return T.if_then_else(T.And(index >= 0, index < num_experts), T.cast(index, "int32"), -1)

    def bits_below(bits: T.PrimExpr, lane: T.PrimExpr) -> T.PrimExpr:
        return T.cast(T.popcount(bits & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))), "int32")

    @T.prim_func
    def route(
        topk_idx: T.Tensor((T.dynamic("idx_rows"), num_topk), idx_dtype),
        slots: T.Tensor((T.dynamic("slot_rows"), num_topk), "int32"),
        dst_slots: T.Tensor((T.dynamic("dst_rows"), num_topk), "int32"),
    ) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH, waits=False)
        n = arguments.scalars(Numbers)
        if copies_idx:
            idx_copy = T.arg("idx_copy", T.Tensor((T.dynamic("copy_rows"), num_topk), idx_dtype))
        with T.Kernel(n.num_blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            before = T.alloc_shared((num_counts,), "int32")  # of earlier pairs and tokens: experts, then ranks
            # Experts of earlier tokens, -1 for none; a column more, so that threads meet different banks.
            staged = T.alloc_shared((at_once * THREADS, num_topk | 1), "int32")
            experts = T.alloc_shared((THREADS,), "int32")  # of the group's pairs
            expert, home, token, first, end, index, dst, mask, group, epoch, failed = (
                T.alloc_var("int32", init=0) for _ in range(11)
            )
            found, sent = T.alloc_local((at_once * num_topk,), "int32"), T.alloc_local((num_ranks,), "int32")
            alike, alike_homes = T.alloc_var("uint32"), T.alloc_var("uint32")
            is_last = T.alloc_var("bool", init=False)
            epoch = load_relaxed(flags.word(r.own, memory.EPOCH + memory.DISPATCH)) + 1
            failed = load_relaxed(flags.word(r.own, memory.FAILED))
            for j in T.unroll(ceil_div(num_counts, THREADS)):
                if j * THREADS + thread < num_counts:
                    before[j * THREADS + thread] = 0
            for to in T.unroll(num_ranks):
                sent[to] = 0

            end = T.min(block * n.groups_each * per_group, n.num_tokens)
            first = 0
            while first < end:
                # A warp loads neighbours; then a thread has whole tokens, whose ranks it counts once.
                for j in T.unroll(at_once * num_topk):
                    found[j] = -1
                    token = first + (j * THREADS + thread) // num_topk
                    if token < end:
                        found[j] = expert_of(topk_idx[token, (j * THREADS + thread) % num_topk])
                T.sync_threads()
                for j in T.unroll(at_once * num_topk):
                    staged[(j * THREADS + thread) // num_topk, (j * THREADS + thread) % num_topk] = found[j]
                T.sync_threads()
                for t in T.unroll(at_once):
                    mask = 0
                    for k in T.unroll(num_topk):
                        expert = staged[t * THREADS + thread, k]
                        if expert >= 0:
                            T.atomic_add(before[expert], 1)
                            mask = mask | (1 << T.truncdiv(expert, num_local))
                    for to in T.unroll(num_ranks):
                        sent[to] = sent[to] + ((mask >> to) & 1)
                first = first + at_once * THREADS
            for to in T.unroll(num_ranks):
                if sent[to] > 0:
                    T.atomic_add(before[num_experts + to], sent[to])

            group = block * n.groups_each
            while group < (block + 1) * n.groups_each:
                token = group * per_group + thread // num_topk
                expert = -1
                if thread < per_group * num_topk and token < n.num_tokens:
                    expert = expert_of(topk_idx[token, thread % num_topk])
                    if copies_idx:
                        idx_copy[token, thread % num_topk] = topk_idx[token, thread % num_topk]
                home = T.truncdiv(T.max(expert, 0), num_local)
                experts[thread] = expert
                T.sync_threads()
                is_last = expert >= 0
                for k in T.serial(thread % num_topk + 1, num_topk):
                    other = experts[thread // num_topk * num_topk + k]
                    if other >= 0 and T.truncdiv(other, num_local) == home:
                        is_last = False
                # Warps take turns: a pair counts those of its warp, and finds what earlier warps have counted.
                alike = T.match_any_sync(expert)
                alike_homes = T.match_any_sync(T.if_then_else(is_last, home, -1))
                for turn in T.serial(THREADS // 32):
                    if warp == turn:
                        if expert >= 0:
                            index = before[expert] + bits_below(alike, lane)
                        if is_last:
                            dst = before[num_experts + home] + bits_below(alike_homes, lane)
                        T.sync_warp()
                        if expert >= 0 and (alike >> T.cast(lane, "uint32")) == T.uint32(1):
                            before[expert] = index + 1
                        if is_last and (alike_homes >> T.cast(lane, "uint32")) == T.uint32(1):
                            before[num_experts + home] = dst + 1
                    T.sync_threads()
                if thread < per_group * num_topk and token < n.num_tokens:
                    slots[token, thread % num_topk] = T.if_then_else(
                        expert >= 0, T.min(index, n.max_index) * num_experts + expert, -1
                    )
                    dst_slots[token, thread % num_topk] = T.if_then_else(is_last, n.first_dst_slot + dst, -1)
                group = group + 1

            if block == n.num_blocks - 1 and failed == 0:
                first = memory.counts_of(epoch, r.rank, num_ranks, num_local)
                for to in r.all_ranks:
                    for j in T.unroll(ceil_div(num_local + 1, THREADS)):
                        index = j * THREADS + thread
                        if index <= num_local:
                            expert = T.if_then_else(index < num_local, to * num_local + index, num_experts + to)
                            tell(flags.word(r.peers[to], first + 2 * index), epoch, before[expert])

    return route
