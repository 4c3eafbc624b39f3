"""Tiles that a thread block holds in registers: how many channels they have, and how they are loaded."""

from tk_core.math import align, ceil_div

DIRECT_COPIES = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    "tl.enable_lower_ldgstg_predicated": True,
}
"""Pass configs for kernels that read each element once: each thread loads 16 bytes from global memory into registers,
not through shared memory. Loads beyond the last channel are predicated, not branched around."""

VECTOR = 8
"""Neighbouring bfloat16 channels that a thread loads at once: 16 bytes."""


def channel_tile(hidden: int, max_threads: int) -> int:
    """Channels of a thread block with 8 channels a thread: whole warps, as few idle threads as possible."""
    num_blocks = ceil_div(hidden, VECTOR * max_threads)
    return align(ceil_div(hidden, num_blocks), VECTOR * 32)
