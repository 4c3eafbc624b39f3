"""group_count: how often each group occurs in a tensor of indices; aux_fi: each expert's share, for the auxiliary loss.

    count[g] = number of (t, k) with group_idx[t, k] = g
    fi[e]    = float32(count[e] · num_experts) / float32(num_tokens · num_aux_topk)       (one IEEE division)

group_idx or topk_idx int64 or int32 (num_tokens, num_topk), count int32 (num_groups), fi float32 (num_experts), which
is 1 for every expert if the load is even.

One launch of one cluster, or of one thread block for few pairs or where there are no clusters. The thread blocks take
turns with the pairs and count them in shared memory. Then each block sends its counts to the blocks that own the
groups, and adds up those that it receives. These are sums of integers, so the result depends neither on the number of
blocks nor on the order of the atomics.

    pairs     [ block 0 | block 1 | … | block C-1 | block 0 | block 1 | … ]
    counts    block 0 … C-1, num_groups each      ──►      block b: the b-th share of the groups, from all C blocks
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

MAX_GROUPS = 1024
MAX_TOPK = 32
MAX_PAIRS = 2**30  # so that no index on the way overflows an int32


_THREADS = 512
_ROUNDS = 8
"""Pairs that a thread loads before it counts the first."""
_MAX_PAIRS_OF_ONE_BLOCK = 4096


def cluster_size_for(num_pairs: int, num_sms: int, arch: Arch) -> int:
    """Thread blocks of the one cluster: one for few pairs, else those of the largest that fits on `num_sms` SMs."""
    if num_pairs <= _MAX_PAIRS_OF_ONE_BLOCK or arch.sm < 90 or num_sms < 8:
        return 1
    # The blocks of a cluster share a GPC. If 8 GPCs have more than 120 SMs together, one of them has at least 16.
    return 16 if arch.sm in (90, 100, 103) and num_sms > 120 else 8


# Blocks write into each other's shared memory, which TileLang does not see. So the barriers are explicit, and shared
# memory is not reused.
@kernel(pass_configs={**DIRECT_COPIES, "tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True})
def _group_count_kernel(num_groups: int, idx_dtype: torch.dtype, as_fi: bool, cluster_size: int, arch: Arch) -> Any:
    """Counts as int32, or with `as_fi` as float32(count · num_groups) / float32(num_tokens · num_aux_topk)."""
    import tilelang.language as T

    threads, rounds = _THREADS, _ROUNDS
    share = align(ceil_div(num_groups, cluster_size), 4)  # in units of 16 bytes, which T.copy_cluster sends at once
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def group_count(
        group_idx: T.Tensor((num_tokens, num_topk), idx_dtype),
        num_aux_topk: T.int32,
        out: T.Tensor((num_groups,), "float32" if as_fi else "int32"),
    ) -> None:
        with T.Kernel(cluster_size, threads=threads, cluster_dims=cluster_size) as block:
            pairs = T.view(group_idx, (num_tokens * num_topk,), idx_dtype)
            groups = T.alloc_fragment((rounds, threads), idx_dtype)
            counts = T.alloc_shared((align(cluster_size * share, threads),), "int32")
            received = T.alloc_shared((cluster_size * share,), "int32")
            if cluster_size > 1:
                T.cluster_arrive_relaxed()
            T.clear(counts)
            T.sync_threads()
            for batch in T.serial(T.ceildiv(num_tokens * num_topk, cluster_size * threads * rounds)):
                for u, i in T.Parallel(rounds, threads):
                    pair = ((batch * rounds + u) * cluster_size + block) * threads + i
                    groups[u, i] = T.if_then_else(pair < num_tokens * num_topk, pairs[pair], T.cast(-1, idx_dtype))
                for u, i in T.Parallel(rounds, threads):
                    if groups[u, i] >= 0 and groups[u, i] < num_groups:
                        T.atomic_add(counts[T.cast(groups[u, i], "int32")], 1)
            T.sync_threads()
            if cluster_size > 1:
                T.cluster_wait()  # All blocks have started: their shared memory may be written.
                for rank in T.unroll(ceil_div(num_groups, share)):
                    sent, received_at = rank * share, block * share
                    T.copy_cluster(
                        counts[sent : sent + share], received[received_at : received_at + share], dst_block=rank
                    )
                T.cluster_sync()
            terms = received if cluster_size > 1 else counts
            for i in T.Parallel(share):
                total = T.alloc_var("int32")
                total = terms[i]
                for rank in T.unroll(1, cluster_size):
                    total = total + terms[rank * share + i]
                if block * share + i < num_groups:
                    if as_fi:
                        # Products in int64: num_tokens · num_topk · num_groups may take more than 31 bits.
                        num_pairs = T.cast(T.cast(num_tokens, "int64") * num_aux_topk, "float32")
                        out[block * share + i] = T.cast(T.cast(total, "int64") * num_groups, "float32") / num_pairs
                    else:
                        out[block * share + i] = total

    return group_count


def _launch_group_count(group_idx: Tensor, num_aux_topk: int | None, out: Tensor) -> None:
    """Write to `out` the counts, int32, or if `num_aux_topk` is given, the result of `aux_fi`, float32."""
    if group_idx.numel() == 0:
        out.zero_()
        return
    arch = get_arch(group_idx.device)
    cluster_size = cluster_size_for(group_idx.numel(), get_num_sms(group_idx.device), arch)
    as_fi = num_aux_topk is not None
    launch = _group_count_kernel(out.shape[0], group_idx.dtype, as_fi, cluster_size, arch)
    launch(group_idx, num_aux_topk if as_fi else 1, out)


def check_pairs(name: str, indices: Tensor) -> None:
    """Raise unless `indices` is a contiguous int64 or int32 (num_tokens, num_topk) of sizes that the kernel takes."""
    num_tokens, num_topk = check.tensor(name, indices, (torch.int64, torch.int32), ("num_tokens", "num_topk"))
    check.in_range(f"num_topk (columns of {name})", num_topk, 1, MAX_TOPK)
    check.require(num_tokens * num_topk <= MAX_PAIRS, name, f"at most {MAX_PAIRS} elements", num_tokens * num_topk)


@op(aligned=())
def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Count how often each group occurs in `group_idx`.

    An index outside 0 … num_groups-1 counts for no group; with TK_DEBUG=1, one of num_groups or more raises.

    Args:
        group_idx: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_groups: From 1 to 1024.

    Returns:
        int32 (num_groups).

    Raises:
        TypeError: group_idx is not an int64 or int32 tensor, or num_groups is not an int.
        ValueError: group_idx has another shape or is not contiguous, or a size is out of range.
    """
    check_pairs("group_idx", group_idx)
    check.in_range("num_groups", num_groups, 1, MAX_GROUPS)
    check.below("group_idx", group_idx, num_groups, "indices below num_groups = {}")
    out = new(group_idx.new_empty, (num_groups,), dtype=torch.int32)
    if launching(out):
        _launch_group_count(group_idx, None, out)
    return out


@op(aligned=())
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Share of each expert in the choices of all tokens, times the number of experts.

    fi[e] = float32(count[e] · num_experts) / float32(num_tokens · num_aux_topk). Names and formula are those of
    DeepSeek's TileKernels 1.0.0. An index outside 0 … num_experts-1 counts for no expert; with TK_DEBUG=1,
    one of num_experts or more raises.

    Args:
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_experts: From 1 to 1024.
        num_aux_topk: Choices of a token that the loss counts, from 1 to 32: usually num_topk.

    Returns:
        float32 (num_experts); zeros without tokens.

    Raises:
        TypeError: topk_idx is not an int64 or int32 tensor, or another argument is not an int.
        ValueError: topk_idx has another shape or is not contiguous, or a size is out of range.
    """
    check_pairs("topk_idx", topk_idx)
    check.in_range("num_experts", num_experts, 1, MAX_GROUPS)
    check.in_range("num_aux_topk", num_aux_topk, 1, MAX_TOPK)
    check.below("topk_idx", topk_idx, num_experts, "indices below num_experts = {}")
    fi = new(topk_idx.new_empty, (num_experts,), dtype=torch.float32)
    if launching(fi):
        _launch_group_count(topk_idx, num_aux_topk, fi)
    return fi
