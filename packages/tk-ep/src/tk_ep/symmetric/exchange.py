"""A step of calls that copy engines serve: one warp waits for peers' flags, then sets its own flag at these peers.

Or it prepares what copy engines tell themselves, behind the data that they copy.
"""

from typing import Any, NamedTuple

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_ep.symmetric.kernels import PASS_CONFIGS

NOBODY = -1
GIVEN_UP = 1 << 30
"""How far behind a rank's flags are set where it has waited in vain."""
PREPARED = 32
"""Values that a step prepares: one by each lane."""


class Step(NamedTuple):
    """What a step waits for, and tells. Flags are words of flags for all ranks, of which each has one."""

    op: int
    first_peer: int
    num_peers: int
    epoch: int
    """The word of this rank's own count"""
    awaited: int
    """Flags here, written by the peers"""
    ahead: int
    """How far ahead of the count they have to be"""
    told: int = NOBODY
    """This rank's flag at the peers, which a failure sets behind, so that they do not read what is written over"""
    told_ahead: int = NOBODY
    """How far ahead of the count the flag is set; NOBODY: it is left, but for a failure"""
    advance: int = 0
    """Added to the count"""
    prepared: int = NOBODY
    """The first of this rank's words for values of its flag that copy engines will copy to peers"""
    prepared_ahead: int = 0
    """How far ahead of the count the first of them is, each of the others one more; after a failure all are behind"""


@kernel(pass_configs=PASS_CONFIGS)
def exchange_kernel(num_ranks: int, arch: Arch) -> Any:
    """The fields of a Step are run-time arguments."""
    import tilelang.language as T

    from tk_ep.device.system import await_epoch, fail, fence_system, load_relaxed, store_relaxed
    from tk_ep.symmetric import arguments, memory
    from tk_ep.symmetric.flags import word

    @T.prim_func
    def exchange() -> None:
        r = arguments.ranks(num_ranks, memory.GATHER)
        step = arguments.scalars(Step)
        with T.Kernel(1, threads=PREPARED):
            thread = T.get_thread_binding()
            peer = step.first_peer + thread
            failed, count, found, value = (T.alloc_var("int32", init=0) for _ in range(4))
            count = load_relaxed(word(r.own, step.epoch))
            failed = load_relaxed(word(r.own, memory.FAILED))
            if thread < step.num_peers and peer != r.rank and failed == 0:
                found = await_epoch(word(r.own, step.awaited + peer), count + step.ahead, r.limit)
                if found - (count + step.ahead) < 0:
                    failed = 1
                    fail(word(r.own, memory.FAILED), r.host, step.op, peer, count + step.ahead, found)
            failed = T.syncthreads_or(failed)
            value = count + step.told_ahead
            if failed != 0:
                value = count - GIVEN_UP
            if thread < step.num_peers and step.told >= 0 and (failed != 0 or step.told_ahead >= 0):
                fence_system()
                for to in r.all_ranks:
                    if peer == to:
                        store_relaxed(word(r.peers[to], step.told + r.rank), value)
            if step.prepared >= 0:
                value = count + step.prepared_ahead + thread
                if failed != 0:
                    value = count - GIVEN_UP
                store_relaxed(word(r.own, step.prepared + thread), value)
            # Not where nothing is added: a step on another stream may be adding.
            if thread == 0 and failed == 0 and step.advance != 0:
                store_relaxed(word(r.own, step.epoch), count + step.advance)

    return exchange
