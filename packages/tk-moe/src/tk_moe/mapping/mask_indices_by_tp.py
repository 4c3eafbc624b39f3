"""mask_indices_by_tp: expert indices as one tensor-parallel rank sees them.

    per_rank = n // num_ep_ranks
    i' = i - tp_rank · per_rank
    out = i' - (i' // (per_rank · num_tp_ranks)) · per_rank · (num_tp_ranks - 1)   if (i // per_rank) mod num_tp_ranks
                                                                                      = tp_rank and i ≥ 0, else -1

indices and out int64 or int32 (num_tokens, num_topk). One thread per index. Where i is kept, i' // (per_rank ·
num_tp_ranks) equals (i // per_rank) // num_tp_ranks, a quotient that the test by mod needs anyway.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_moe.balance.group_count import MAX_PAIRS

_THREADS = 128


@kernel(pass_configs=DIRECT_COPIES)
def _mask_indices_by_tp_kernel(idx_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def mask_indices_by_tp(
        indices: T.Tensor((num_tokens, num_topk), idx_dtype),
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
        out: T.Tensor((num_tokens, num_topk), idx_dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens * num_topk, _THREADS), threads=_THREADS) as block:
            flat = T.view(indices, (num_tokens * num_topk,), idx_dtype)
            flat_out = T.view(out, (num_tokens * num_topk,), idx_dtype)
            for i in T.Parallel(_THREADS):
                if block * _THREADS + i < num_tokens * num_topk:
                    index, quotient, group = T.alloc_var("int64"), T.alloc_var("uint64"), T.alloc_var("uint64")
                    index = T.cast(flat[block * _THREADS + i], "int64")
                    # Unsigned, where truncating and flooring division are the same.
                    quotient = T.truncdiv(T.cast(index, "uint64"), T.cast(per_rank, "uint64"))
                    group = T.truncdiv(quotient, T.cast(num_tp_ranks, "uint64"))
                    if index >= 0 and quotient - group * T.cast(num_tp_ranks, "uint64") == T.cast(tp_rank, "uint64"):
                        removed = T.cast(tp_rank, "int64") + T.cast(group, "int64") * T.cast(num_tp_ranks - 1, "int64")
                        index = index - removed * T.cast(per_rank, "int64")
                    else:
                        index = T.int64(-1)
                    flat_out[block * _THREADS + i] = T.cast(index, idx_dtype)

    return mask_indices_by_tp


@op(aligned=())
def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    """Keep and renumber the experts of one tensor-parallel rank; all others become -1.

    Each expert-parallel rank has per_rank = n // num_ep_ranks consecutive experts. Expert i is kept where
    (i // per_rank) mod num_tp_ranks = tp_rank, and becomes i' - (i' // (per_rank · num_tp_ranks)) · per_rank ·
    (num_tp_ranks - 1) with i' = i - tp_rank · per_rank. Names and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        indices: int64 or int32 (num_tokens, num_topk), contiguous; negative means none. An index of n or more is
            treated like any other; with TK_DEBUG=1 it raises.
        n: Number of experts, at least num_ep_ranks and below 2³¹.
        num_ep_ranks: Expert-parallel ranks, at least 1.
        tp_rank: From 0 to num_tp_ranks - 1.
        num_tp_ranks: Tensor-parallel ranks, at least 1.

    Returns:
        (num_tokens, num_topk) of the dtype of indices.

    Raises:
        TypeError: indices is not a tensor of these dtypes, or another argument is not an int.
        ValueError: indices has another shape or is not contiguous, or a number is out of range.
    """
    num_tokens, num_topk = check.tensor("indices", indices, (torch.int64, torch.int32), ("num_tokens", "num_topk"))
    check.require(num_tokens * num_topk <= MAX_PAIRS, "indices", f"at most {MAX_PAIRS} elements", num_tokens * num_topk)
    check.in_range("num_ep_ranks", num_ep_ranks, 1, 2**31 - 1)
    check.in_range("n", n, num_ep_ranks, 2**31 - 1)
    check.in_range("num_tp_ranks", num_tp_ranks, 1, 2**31 - 1)
    check.in_range("tp_rank", tp_rank, 0, num_tp_ranks - 1)
    check.below("indices", indices, n, "indices below n = {}")
    out = new(torch.empty_like, indices)
    if launching(out):
        mask = _mask_indices_by_tp_kernel(indices.dtype, get_arch(indices.device))
        mask(indices, n // num_ep_ranks, tp_rank, num_tp_ranks, out)
    return out
