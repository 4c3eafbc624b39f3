"""group_count: how often each group is chosen.

    count[g] = number of (t, k) with group_idx[t, k] = g

group_idx int64 or int32 (num_tokens, num_topk), count int32 (num_groups). `aux_fi` is the same kernel with another last
step.

One launch, whatever the number of pairs: the blocks of one cluster take rounds of pairs in turn, count them in shared
memory, and then each adds up its share of the groups over the shared memory of all of them. Every sum is of integers,
so the result does not depend on the number of blocks, nor on who comes first.

    pairs     [ block 0 | block 1 | … | block C-1 | block 0 | block 1 | … ]
    counts    block 0 … C-1, num_groups each      ──►      block b: groups b · ⌈num_groups / C⌉ and on, from all C
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
from tk_moe.device.async_copy import load_from_cluster
from tk_moe.lib.cluster import largest_cluster

MAX_GROUPS = 1024
MAX_TOPK = 32
MAX_PAIRS = 2**30  # so that no index on the way overflows an int32


@dataclass(frozen=True)
class GroupCountConfig:
    """How the pairs are dealt out to blocks."""

    cluster_size: int
    """Blocks of the one cluster that does it all."""

    threads = 512
    rounds = 8
    """Pairs that a thread has under way at a time."""
    max_pairs_of_one_block = 4096

    @staticmethod
    @cache
    def best(few_pairs: bool, num_sms: int, arch: Arch) -> "GroupCountConfig":
        """One block for few pairs, else the largest cluster that `num_sms` SMs take."""
        return GroupCountConfig(1 if few_pairs else largest_cluster(num_sms, arch))


# The order of shared memory is kept by the barriers that are written out here.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_thread_storage_sync": True,
        "tl.disable_shared_memory_reuse": True,
    }
)
def _group_count_kernel(
    num_groups: int, idx_dtype: torch.dtype, as_fi: bool, config: GroupCountConfig, arch: Arch
) -> Any:
    """Counts as int32, or with `as_fi` as float32(count · num_groups) / float32(num_tokens · num_aux_topk)."""
    import tilelang.language as T

    threads, rounds, cluster_size = config.threads, config.rounds, config.cluster_size
    share = ceil_div(num_groups, cluster_size)
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def group_count(
        group_idx: T.Tensor((num_tokens, num_topk), idx_dtype),
        num_aux_topk: T.int32,
        out: T.Tensor((num_groups,), "float32" if as_fi else "int32"),
    ) -> None:
        with T.Kernel(cluster_size, threads=threads, cluster_dims=cluster_size) as block:
            thread = T.get_thread_binding()
            num_pairs = num_tokens * num_topk
            pairs = T.view(group_idx, (num_tokens * num_topk,), idx_dtype)
            counts = T.alloc_shared((num_groups,), "int32")
            groups = T.alloc_local((rounds,), idx_dtype)
            values = T.alloc_local((cluster_size,), "int32")
            total = T.alloc_var("int32")
            for j in T.unroll(ceil_div(num_groups, threads)):
                if j * threads + thread < num_groups:
                    counts[j * threads + thread] = 0
            T.sync_threads()
            for batch in T.serial(T.ceildiv(num_pairs, cluster_size * threads * rounds)):
                for u in T.unroll(rounds):
                    index = ((batch * rounds + u) * cluster_size + block) * threads + thread
                    groups[u] = T.cast(-1, idx_dtype)
                    if index < num_pairs:
                        groups[u] = pairs[index]
                for u in T.unroll(rounds):
                    if groups[u] >= 0 and groups[u] < num_groups:
                        T.atomic_add(counts[T.cast(groups[u], "int32")], 1)
            if cluster_size > 1:
                T.sync_warp()  # all its lanes have to come to a cluster's barrier together
                T.cluster_sync()
            else:
                T.sync_threads()
            for j in T.unroll(ceil_div(share, threads)):
                group = block * share + j * threads + thread
                if j * threads + thread < share and group < num_groups:
                    if cluster_size > 1:
                        for rank in T.unroll(cluster_size):
                            values[rank] = load_from_cluster(T.access_ptr(counts[group], "r"), rank)
                    else:
                        values[0] = counts[group]
                    total = 0
                    for rank in T.unroll(cluster_size):
                        total = total + values[rank]
                    if as_fi:
                        # A long product, as num_tokens · num_topk · num_groups may take more than 31 bits.
                        out[group] = T.cast(T.cast(total, "int64") * num_groups, "float32") / T.cast(
                            T.cast(num_tokens, "int64") * num_aux_topk, "float32"
                        )
                    else:
                        out[group] = total
            if cluster_size > 1:
                # No block goes before the others have read its counts: what is stored above depends on them.
                T.sync_warp()
                T.cluster_arrive_relaxed()
                T.cluster_wait()

    return group_count


def launch_group_count(group_idx: torch.Tensor, num_aux_topk: int | None, out: torch.Tensor) -> None:
    """Count into `out`; as `aux_fi` does if `num_aux_topk` is given."""
    if group_idx.numel() == 0:
        out.zero_()
        return
    arch = get_arch(group_idx.device)
    few_pairs = group_idx.numel() <= GroupCountConfig.max_pairs_of_one_block
    config = GroupCountConfig.best(few_pairs, get_num_sms(group_idx.device), arch)
    as_fi = num_aux_topk is not None
    launch = _group_count_kernel(out.shape[0], group_idx.dtype, as_fi, config, arch)
    launch(group_idx, num_aux_topk if as_fi else 1, out)


def check_indices(name: str, indices: torch.Tensor, bound_name: str, bound: int) -> None:
    """With TK_DEBUG, outside of torch.compile: raise ValueError if an index is not below `bound`."""
    if torch.compiler.is_compiling() or not env.debug() or indices.numel() == 0 or indices.is_meta:
        return
    # A stream that is being captured can't be waited for.
    if indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    highest = int(indices.max())
    check.require(highest < bound, name, f"indices below {bound_name} = {bound}", highest)


def check_pairs(name: str, indices: torch.Tensor) -> None:
    """Raise unless `indices` is a contiguous int64 or int32 (num_tokens, num_topk) of sizes that the kernel takes."""
    num_tokens, num_topk = check.tensor(name, indices, (torch.int64, torch.int32), ("num_tokens", "num_topk"))
    check.in_range(f"num_topk (columns of {name})", num_topk, 1, MAX_TOPK)
    check.require(num_tokens * num_topk <= MAX_PAIRS, name, f"at most {MAX_PAIRS} elements", num_tokens * num_topk)


def _group_count_reference(group_idx: torch.Tensor, out: torch.Tensor) -> None:
    from tk_moe.reference.balance.group_count import group_count

    out.copy_(group_count(group_idx, out.shape[0]))


@op("tk_moe::group_count_out", mutates=("out",), reference=_group_count_reference)
def _group_count_out(group_idx: torch.Tensor, out: torch.Tensor) -> None:
    """Launch."""
    launch_group_count(group_idx, None, out)


@replayable
def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Count how often each group stands in `group_idx`.

    An index that is negative, or not below `num_groups`, is of no group; with TK_DEBUG=1 the latter raises.

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
    check_indices("group_idx", group_idx, "num_groups", num_groups)
    out = group_idx.new_empty((num_groups,), dtype=torch.int32)
    _group_count_out(group_idx, out)
    return out
