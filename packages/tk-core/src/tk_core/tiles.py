"""Tiles that lie in registers: how many channels a thread block takes, and how they are loaded."""

from tk_core.math import align, ceil_div

DIRECT_COPIES = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    "tl.enable_lower_ldgstg_predicated": True,
}
"""Pass configs for kernels that read each element once: global memory to registers, 16 bytes a thread, without shared
memory between, and with a predicate instead of a branch where a tile goes beyond the last channel."""

VECTOR = 8
"""Neighbouring bfloat16 channels of a thread: 16 bytes."""


def channel_tile(hidden: int, max_threads: int) -> int:
    """Channels of a thread block that has eight a thread: whole warps, as few idle threads as possible."""
    num_blocks = ceil_div(hidden, VECTOR * max_threads)
    return align(ceil_div(hidden, num_blocks), VECTOR * 32)
