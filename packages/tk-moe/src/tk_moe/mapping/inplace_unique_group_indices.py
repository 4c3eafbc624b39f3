"""inplace_unique_group_indices: in each row the second and later copies of a group become -1, in place.

    group_indices[t, k] = -1     if it is a group, and group_indices[t, j] is the same one for some j < k

group_indices int64 or int32 (num_tokens, num_topk). A thread takes a token, and marks the groups it has seen in a
bitmask of up to four words; only indices that change are written.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.balance.group_count import check_indices, check_pairs

MAX_GROUPS = 128


@dataclass(frozen=True)
class InplaceUniqueGroupIndicesConfig:
    """Launch configuration."""

    threads: int

    @staticmethod
    @cache
    def best(arch: Arch) -> "InplaceUniqueGroupIndicesConfig":
        """Small thread blocks, so that 8192 tokens occupy most SMs. Untuned."""
        return InplaceUniqueGroupIndicesConfig(threads=64)


# Every access has a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _inplace_unique_group_indices_kernel(
    num_groups: int,
    num_topk: int,
    idx_dtype: torch.dtype,
    alignment: int,
    config: InplaceUniqueGroupIndicesConfig,
    arch: Arch,
) -> Any:
    """`alignment` of each row is in bytes."""
    import tilelang.language as T

    vector = alignment // idx_dtype.itemsize
    threads = config.threads
    num_words = ceil_div(num_groups, 32)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def inplace_unique_group_indices(group_indices: T.Tensor((num_tokens, num_topk), idx_dtype)) -> None:
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            groups = T.alloc_local((num_topk,), idx_dtype)
            seen = T.alloc_local((num_words,), "uint32")
            before = T.alloc_var("uint32")
            bit = T.alloc_var("uint32")
            if token < num_tokens:
                for c in T.unroll(num_topk // vector):
                    for v in T.vectorized(vector):
                        groups[c * vector + v] = group_indices[token, c * vector + v]
                for word in T.unroll(num_words):
                    seen[word] = T.uint32(0)
                for k in T.unroll(num_topk):
                    before = T.uint32(0)
                    for word in T.unroll(num_words):
                        # All words are updated: an array that is indexed dynamically would be in local memory.
                        bit = T.if_then_else(
                            T.And(groups[k] >= 32 * word, groups[k] < T.min(32 * word + 32, num_groups)),
                            T.uint32(1) << (T.cast(groups[k], "uint32") & T.uint32(31)),
                            T.uint32(0),
                        )
                        before = before | (seen[word] & bit)
                        seen[word] = seen[word] | bit
                    if before != T.uint32(0):
                        group_indices[token, k] = T.cast(-1, idx_dtype)

    return inplace_unique_group_indices


def _inplace_unique_group_indices_reference(group_indices: torch.Tensor, num_groups: int) -> None:
    from tk_moe.reference.mapping.inplace_unique_group_indices import inplace_unique_group_indices

    inplace_unique_group_indices(group_indices, num_groups)


@op(
    "tk_moe::inplace_unique_group_indices_out",
    mutates=("group_indices",),
    reference=_inplace_unique_group_indices_reference,
)
def _inplace_unique_group_indices_out(group_indices: torch.Tensor, num_groups: int) -> None:
    """Launch the kernel."""
    num_tokens, num_topk = group_indices.shape
    if num_tokens == 0:
        return
    arch = get_arch(group_indices.device)
    config = InplaceUniqueGroupIndicesConfig.best(arch)
    alignment = check.row_alignment(group_indices)
    _inplace_unique_group_indices_kernel(num_groups, num_topk, group_indices.dtype, alignment, config, arch)(
        group_indices
    )


@replayable
def inplace_unique_group_indices(group_indices: torch.Tensor, num_groups: int) -> None:
    """Leave the first copy of each group in each row and set the others to -1, in place.

    Only 0 … num_groups - 1 are groups: other values stay as they are (with TK_DEBUG=1 larger ones raise).

    Args:
        group_indices: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32. Changed.
        num_groups: From 1 to 128.

    Raises:
        TypeError: group_indices is not a tensor of these dtypes, or num_groups is not an int.
        ValueError: group_indices has another shape or is not contiguous, or a size is out of range.
    """
    check_pairs("group_indices", group_indices)
    check.in_range("num_groups", num_groups, 1, MAX_GROUPS)
    check_indices("group_indices", group_indices, "num_groups", num_groups)
    _inplace_unique_group_indices_out(group_indices, num_groups)
