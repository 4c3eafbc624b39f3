"""Prefix sums over the threads of a block."""

import tilelang.language as T


@T.macro
def scan_two(sums: T.Buffer, all_sums: T.Buffer) -> None:
    """Two inclusive prefix sums over the threads of the block, of `sums` in place; `all_sums` become the totals.

    Both are int32 (2) in registers. A barrier is needed before the next call.
    """
    thread = T.get_thread_binding()
    warps, warp, lane = T.get_thread_extent() // 32, thread // 32, thread % 32
    warp_sums = T.alloc_shared((2, warps), "int32")
    for step in T.unroll(5):
        for i in T.unroll(2):
            lower = T.shfl_up(sums[i], 1 << step)
            sums[i] = sums[i] + T.if_then_else(lane >= (1 << step), lower, 0)
    if lane == 31:
        for i in T.unroll(2):
            warp_sums[i, warp] = sums[i]
    T.sync_threads()
    for i in T.unroll(2):
        of_warp = T.if_then_else(lane < warps, warp_sums[i, lane], 0)
        all_sums[i] = T.warp_reduce_sum(of_warp)
        sums[i] = sums[i] + T.warp_reduce_sum(T.if_then_else(lane < warp, of_warp, 0))
