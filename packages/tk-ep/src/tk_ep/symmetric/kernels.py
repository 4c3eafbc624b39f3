"""What the builders of all kernels share: sizes that are compile-time, and how many warps a thread block has."""

from typing import NamedTuple

from tk_core.arch import Arch, UnsupportedArchError

# Written per warp, which moves whole rows by bulk copies: a tile would be a thread block's. All barriers are written
# out, as warps take different numbers of rows, and every index is compared or clamped before it is used.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
}
_OTHER_SHARED_BYTES = 8 << 10
_MAX_WARPS = 16


class Sizes(NamedTuple):
    """Compile-time sizes of a dispatch and of the combines that follow it."""

    num_ranks: int
    num_experts: int
    num_topk: int

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks


def with_bulk_copies(arch: Arch) -> Arch:
    """The architecture. Raises UnsupportedArchError if it has no bulk copies."""
    if not arch.has_tma:
        raise UnsupportedArchError("tk_ep", arch.name, "bulk copies (sm_90 or newer)")
    return arch


def max_row_bytes(arch: Arch) -> int:
    """The longest row that a warp can hold in shared memory. Raises UnsupportedArchError without bulk copies."""
    return with_bulk_copies(arch).shared_memory_each(1) - _OTHER_SHARED_BYTES


def num_warps(row_bytes: int, arch: Arch) -> int:
    """Warps of a thread block, each of which holds a row in shared memory."""
    return max(1, min(_MAX_WARPS, max_row_bytes(arch) // row_bytes))
