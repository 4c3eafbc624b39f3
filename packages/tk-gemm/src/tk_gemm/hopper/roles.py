"""What each warp of a thread block does: warpgroups that multiply, and behind them the warps that fill the ring."""

from collections.abc import Callable, Sequence

import tilelang.language as T

from tk_gemm import scheduler
from tk_gemm.scheduler import Scheduler


@T.macro
def split(
    num_warpgroups: int,
    block: T.PrimExpr,
    multiply: Callable[[int], None],
    new_scheduler: Callable[[], Scheduler],
    warps: Sequence[Callable[[Scheduler], None]],
) -> None:
    """Run multiply(w) in each multiplying warpgroup, and up to four functions of a scheduler, each in a warp.

    Each multiplying warpgroup has a branch of its own, in which its rows are constants, and each branch begins with
    setmaxnreg, behind which ptxas takes a warp to be whole: else addresses and descriptors pass from registers to
    uniform registers in each step.
    """
    thread = T.get_thread_binding()
    if thread < 128:
        T.set_max_nreg(232, 1)
        multiply(0)
    elif thread < 128 * num_warpgroups:
        T.set_max_nreg(232, 1)
        multiply(1)
    elif thread < 128 * num_warpgroups + 32:
        _find_tiles(block, new_scheduler, warps[:1])
    elif thread < 128 * num_warpgroups + 64:
        _find_tiles(block, new_scheduler, warps[1:2])
    elif thread < 128 * num_warpgroups + 96:
        _find_tiles(block, new_scheduler, warps[2:3])
    else:
        _find_tiles(block, new_scheduler, warps[3:4])


@T.macro
def _find_tiles(
    block: T.PrimExpr, new_scheduler: Callable[[], Scheduler], warps: Sequence[Callable[[Scheduler], None]]
) -> None:
    T.set_max_nreg(40, 0)
    for use in warps:
        s = new_scheduler()
        scheduler.start(s, block)
        use(s)
