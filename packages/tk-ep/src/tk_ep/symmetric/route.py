"""What a source knows of its own pairs of a token and a slot: the first kernel of a dispatch without a handle.

Thread blocks have consecutive parts of the tokens. A block counts the pairs of each expert, and the tokens for each
rank, in the parts before its own; then it goes through its own part in groups of at most 256 pairs, in which each pair
counts those before it that are alike. It also copies its part of topk_idx, for the handle.
"""

from typing import Any, NamedTuple

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes

THREADS = 256
_EARLIER = 32
"""Experts of earlier tokens that a thread loads before it counts the first."""


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
    """Write `slots` and `dst_slots` (memory.TokenRow; EPHandle.dst_buffer_slot_idx), and `counts`, int32 (E + R,)."""
    import tilelang.language as T

    from tk_ep.symmetric import arguments

    num_ranks, num_experts, num_topk = sizes
    num_local, num_counts = sizes.num_local_experts, num_experts + num_ranks
    per_group = group_tokens(num_topk)
    at_once = max(1, _EARLIER // num_topk)

    @T.prim_func
    def route(
        topk_idx: T.Tensor((T.dynamic("idx_rows"), num_topk), idx_dtype),
        slots: T.Tensor((T.dynamic("slot_rows"), num_topk), "int32"),
        dst_slots: T.Tensor((T.dynamic("dst_rows"), num_topk), "int32"),
        counts: T.Tensor((num_counts,), "int32"),
    ) -> None:
        n = arguments.scalars(Numbers)
        if copies_idx:
            idx_copy = T.arg("idx_copy", T.Tensor((T.dynamic("copy_rows"), num_topk), idx_dtype))
        with T.Kernel(n.num_blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            before = T.alloc_shared((num_counts,), "int32")  # of earlier pairs and tokens: experts, then ranks
            experts = T.alloc_shared((THREADS,), "int32")  # of the group's pairs, -1 for none
            ranks = T.alloc_shared((THREADS,), "int32")  # of the group's tokens, a bit for each
            expert, home, token, index, dst, mask, group = (T.alloc_var("int32", init=0) for _ in range(7))
            sent = T.alloc_local((num_ranks,), "int32")
            loaded = T.alloc_local((at_once, num_topk), idx_dtype)
            is_last = T.alloc_var("bool", init=False)
            for j in T.unroll(ceil_div(num_counts, THREADS)):
                if j * THREADS + thread < num_counts:
                    before[j * THREADS + thread] = 0
            for r in T.unroll(num_ranks):
                sent[r] = 0
            T.sync_threads()

            token = thread
            while token < T.min(block * n.groups_each * per_group, n.num_tokens):
                for t in T.unroll(at_once):
                    for k in T.unroll(num_topk):
                        loaded[t, k] = -1
                        if token + t * THREADS < T.min(block * n.groups_each * per_group, n.num_tokens):
                            loaded[t, k] = topk_idx[token + t * THREADS, k]
                for t in T.unroll(at_once):
                    mask = 0
                    for k in T.unroll(num_topk):
                        if loaded[t, k] >= 0 and loaded[t, k] < num_experts:
                            expert = T.cast(loaded[t, k], "int32")
                            T.atomic_add(before[expert], 1)
                            mask = mask | (1 << T.truncdiv(expert, num_local))
                    for r in T.unroll(num_ranks):
                        sent[r] = sent[r] + ((mask >> r) & 1)
                token = token + THREADS * at_once
            for r in T.unroll(num_ranks):
                if sent[r] > 0:
                    T.atomic_add(before[num_experts + r], sent[r])
            T.sync_threads()

            group = block * n.groups_each
            while group < (block + 1) * n.groups_each:
                token = group * per_group + thread // num_topk
                expert = -1
                if thread < per_group * num_topk and token < n.num_tokens:
                    slot = thread % num_topk
                    if topk_idx[token, slot] >= 0 and topk_idx[token, slot] < num_experts:
                        expert = T.cast(topk_idx[token, slot], "int32")
                    if copies_idx:
                        idx_copy[token, slot] = topk_idx[token, slot]
                home = T.truncdiv(T.max(expert, 0), num_local)
                experts[thread] = expert
                T.sync_threads()
                mask = 0
                if thread < per_group:
                    for k in T.unroll(num_topk):
                        if experts[thread * num_topk + k] >= 0:
                            mask = mask | (1 << T.truncdiv(experts[thread * num_topk + k], num_local))
                ranks[thread] = mask
                T.sync_threads()
                index = 0
                dst = 0
                is_last = expert >= 0
                if expert >= 0:
                    index = before[expert]
                    dst = before[num_experts + home]
                    for pair in T.serial(thread):
                        if experts[pair] == expert:
                            index = index + 1
                    for earlier in T.serial(thread // num_topk):
                        dst = dst + ((ranks[earlier] >> home) & 1)
                    for k in T.serial(thread % num_topk + 1, num_topk):
                        other = experts[thread // num_topk * num_topk + k]
                        if other >= 0 and T.truncdiv(other, num_local) == home:
                            is_last = False
                T.sync_threads()
                if expert >= 0:
                    T.atomic_add(before[expert], 1)
                if is_last:
                    T.atomic_add(before[num_experts + home], 1)
                if thread < per_group * num_topk and token < n.num_tokens:
                    slots[token, thread % num_topk] = T.if_then_else(
                        expert >= 0, T.min(index, n.max_index) * num_experts + expert, -1
                    )
                    dst_slots[token, thread % num_topk] = T.if_then_else(is_last, n.first_dst_slot + dst, -1)
                T.sync_threads()
                group = group + 1

            if block == n.num_blocks - 1:
                for j in T.unroll(ceil_div(num_counts, THREADS)):
                    if j * THREADS + thread < num_counts:
                        counts[j * THREADS + thread] = before[j * THREADS + thread]

    return route
