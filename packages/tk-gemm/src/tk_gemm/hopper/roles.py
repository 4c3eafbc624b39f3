"""What each warp of a thread block does: warpgroups that multiply, and behind them the warps that fill the ring."""

from collections.abc import Callable

import tilelang.language as T

from tk_gemm import scheduler
from tk_gemm.scheduler import Scheduler


@T.macro
def split(
    num_warpgroups: int,
    block: T.PrimExpr,
    multiply: Callable[[int], None],
    new_scheduler: Callable[[], Scheduler],
    load: Callable[[Scheduler], None],
    write: Callable[[Scheduler], None],
) -> None:
    """Run multiply(w) in each multiplying warpgroup, load(s) and write(s) in two warps that find the block's tiles.

    Each multiplying warpgroup has a branch of its own, in which its rows are constants: where it takes them from its
    number, descriptors of operands pass from registers to uniform registers in each step.
    """
    thread = T.get_thread_binding()
    if thread < 128:
        T.set_max_nreg(232, 1)
        multiply(0)
    elif thread < 128 * num_warpgroups:
        T.set_max_nreg(232, 1)
        multiply(1)
    else:
        T.set_max_nreg(40, 0)
        if thread < 128 * num_warpgroups + 64:
            s = new_scheduler()
            scheduler.start(s, block)
            if thread < 128 * num_warpgroups + 32:
                load(s)
            else:
                write(s)
