"""What dense and paged scores' host code shares: the checks of their arguments, their results, their GPUs."""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, UnsupportedArchError, get_arch
from tk_core.math import align
from tk_core.op import new

ROW_BYTES = 1024
"""Rows of scores begin at multiples of this."""

PASS_CONFIGS = {
    # The rings' barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared in the kernels.
    "tl.disable_safe_memory_legalize": True,
}


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
