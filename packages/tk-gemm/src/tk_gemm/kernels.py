"""What the builders of all products' kernels share."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tvm.tirx import PrimExpr

BLOCK_K = 128
"""Channels that share a scale factor, and channels of a step of FP8 products."""

BF16_STEP_K = 64
"""Channels of a step of BF16 products: as many bytes as those of a step in FP8."""

Kind = Literal["dense", "ids", "psum", "masked", "k", "k_flat"]
"""How the weights of a tile's rows are found: one matrix for all, a group for each row, ends of groups, or a buffer for
each group; "k": groups are ranges of K; "k_flat": and each group's operands are matrices of their own."""

Addend = Literal["c", "d"]
"""What is added to the products: C, which threads read, or what is in D, float32, which TMA adds to."""

PASS_CONFIGS = {
    # The ring's barriers are all that the roles need.
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    # Every access is clamped or compared here; TileLang's checks in the loop over channels cost up to 12 %.
    "tl.disable_safe_memory_legalize": True,
}


def stride(name: str) -> "PrimExpr":
    """A stride known at run time, of 64 bits: rows may be 2³¹ elements apart, and groups of rows are."""
    import tilelang.language as T

    return T.dynamic(name, "int64")


def strides(name: str) -> "tuple[PrimExpr, PrimExpr]":
    """Strides of a tensor's groups and rows, known at run time."""
    return stride(f"{name}_group_stride"), stride(f"{name}_stride")
