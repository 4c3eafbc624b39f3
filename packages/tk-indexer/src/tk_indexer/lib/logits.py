"""What dense and paged scores' host code shares: the checks of their arguments, their results, their GPUs."""

from typing import NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, UnsupportedArchError, get_arch
from tk_core.math import align
from tk_core.op import new
from tk_indexer.lib.rows import DIMS, FP4_DIMS, FP4_DTYPES, NUM_HEADS

Pair = tuple[Tensor, Tensor | None]

ROW_BYTES = 1024
"""Rows of scores begin at multiples of this."""

PASS_CONFIGS = {
    # The rings' barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared in the kernels.
    "tl.disable_safe_memory_legalize": True,
}


class Queries(NamedTuple):
    """Queries that fit their factors."""

    data: Tensor
    sf: Tensor | None
    """None for e4m3"""
    sizes: tuple[int, ...]
    """Those before the heads"""
    num_heads: int
    dim: int
    is_fp4: bool


def check_queries(q: Pair, sizes: tuple[str, ...]) -> Queries:
    """Check a pair (data, sf or None): data (*sizes, H, D) e4m3, or (*sizes, H, D / 2) in FP4 with sf (*sizes, H)."""
    data, sf = check.pair("q", q, "a pair (data, sf or None)")
    *found, num_heads, width = check.tensor("q[0]", data, (torch.float8_e4m3fn, *FP4_DTYPES), (*sizes, "H", "D"))
    is_fp4 = data.dtype in FP4_DTYPES
    dim = 2 * width if is_fp4 else width
    check.one_of("q[0] (H)", num_heads, NUM_HEADS)
    check.one_of("q[0] (D)", dim, FP4_DIMS if is_fp4 else DIMS)
    if is_fp4:
        check.tensor("q[1]", sf, (torch.int32,), (*found, num_heads), device=data.device)
    else:
        check.require_type(sf is None, "q[1]", "None, for e4m3 queries", type(sf).__name__)
    return Queries(data, sf, tuple(found), num_heads, dim, is_fp4)


def check_options(clean_logits: bool, logits_dtype: torch.dtype) -> None:
    """Raise TypeError for what is no flag, or no dtype of scores."""
    check.flag("clean_logits", clean_logits)
    is_dtype = logits_dtype in (torch.float32, torch.bfloat16)
    check.require_type(is_dtype, "logits_dtype", "torch.float32 or torch.bfloat16", logits_dtype)


def new_logits(like: Tensor, num_rows: int, num_cols: int, dtype: torch.dtype) -> Tensor:
    """An op's result, on the device of `like`."""
    strides = align(num_cols, ROW_BYTES // dtype.itemsize), 1
    return new(like.new_empty_strided, (num_rows, num_cols), strides, dtype=dtype)


def arch_of(op: str, device: torch.device) -> Arch:
    """The GPU's architecture, of one that has the tensor cores which scores need; else UnsupportedArchError."""
    arch = get_arch(device)
    if not (arch.has_wgmma or arch.has_tcgen05):
        raise UnsupportedArchError(f"tk_indexer.{op}", arch.name, "sm_90a, sm_100a, or the reference backend")
    return arch
