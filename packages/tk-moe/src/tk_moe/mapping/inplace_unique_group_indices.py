"""inplace_unique_group_indices: in each row the second and later copies of a group become -1, in place.

    group_indices[t, k] = -1     if it is a group, and group_indices[t, j] is the same one for some j < k

group_indices int64 or int32 (num_tokens, num_topk). One thread per token; only indices that change are written.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_core.tiles import DIRECT_COPIES
from tk_moe.balance.group_count import check_pairs

MAX_GROUPS = 128
_BLOCK_TOKENS = 64
"""Tokens of a thread block, one per thread: few, so that 8192 tokens occupy most SMs."""


@kernel(pass_configs=DIRECT_COPIES)
def _inplace_unique_group_indices_kernel(num_groups: int, num_topk: int, idx_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def inplace_unique_group_indices(group_indices: T.Tensor((num_tokens, num_topk), idx_dtype)) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=_BLOCK_TOKENS) as block:
            first = block * _BLOCK_TOKENS
            groups = T.alloc_fragment((_BLOCK_TOKENS, num_topk), idx_dtype)
            # A second name for the same registers: in one loop TileLang indexes a fragment in one way only.
            earlier = T.alloc_fragment((_BLOCK_TOKENS, num_topk), idx_dtype)
            T.annotate_layout({x: T.Fragment(x.shape, forward_fn=lambda t, k: (t, k)) for x in (groups, earlier)})
            T.copy(group_indices[first : first + _BLOCK_TOKENS, :], groups)
            T.copy(groups, earlier)
            for t in T.Parallel(_BLOCK_TOKENS):
                for k in T.unroll(1, num_topk):
                    is_copy = T.alloc_var("bool")
                    is_copy = False
                    for j in T.unroll(num_topk - 1):
                        is_copy = is_copy or (j < k and earlier[t, j] == groups[t, k])
                    is_group = groups[t, k] >= 0 and groups[t, k] < num_groups
                    if is_copy and is_group and first + t < num_tokens:
                        group_indices[first + t, k] = T.cast(-1, idx_dtype)

    return inplace_unique_group_indices


@op(writes=("group_indices",))
def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
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
    check.below("group_indices", group_indices, num_groups, "indices below num_groups = {}")
    if launching(group_indices):
        num_topk, dtype, arch = group_indices.shape[1], group_indices.dtype, get_arch(group_indices.device)
        _inplace_unique_group_indices_kernel(num_groups, num_topk, dtype, arch)(group_indices)
