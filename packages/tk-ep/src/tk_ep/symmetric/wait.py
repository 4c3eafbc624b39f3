"""Waits until what all ranks have told or sent is here, and adds up what they have told: one thread block."""

from typing import Any, NamedTuple

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_ep.symmetric import memory
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes


@kernel(pass_configs=PASS_CONFIGS)
def wait_kernel(num_ranks: int, op: int, arch: Arch) -> Any:
    """Wait for the rows of all ranks; for a barrier, also tell them that this one is here."""
    import tilelang.language as T

    from tk_ep.symmetric import arguments, flags

    @T.prim_func
    def wait() -> None:
        r = arguments.ranks(num_ranks, op)
        with T.Kernel(1, threads=32):
            failed = T.alloc_var("int32", init=0)
            if op == memory.BARRIER:
                flags.signal(r, memory.flag_of(memory.ARRIVED, op), 1)
            failed = flags.await_ranks(r, memory.flag_of(memory.ARRIVED, op), 1)
            if op == memory.BARRIER and failed == 0:
                flags.advance(r)

    return wait


class Numbers(NamedTuple):
    """Run-time numbers of wait_for_counts."""

    num_max_tokens: int
    alignment: int
    num_rows: int
    awaits_rows: int
    """Whether to wait for the tokens, too, then add to the caller's statistics"""


@kernel(pass_configs=PASS_CONFIGS)
def wait_for_counts_kernel(sizes: Sizes, do_expand: bool, has_stats: bool, arch: Arch) -> Any:
    """Wait for all ranks' counts, or tokens too; write what follows from counts. After a failure all counts are 0.

    `host_counts`, an address or 0, gets the numbers of tokens and rows, and the aligned count of each expert.
    """
    import tilelang.language as T

    from tk_ep.device.system import fail, load_relaxed, load_told, nanoseconds, store_on_host
    from tk_ep.symmetric import arguments, flags

    num_ranks, _, num_topk = sizes
    num_local = sizes.num_local_experts
    threads = align(num_local, 32)
    steps = (threads - 1).bit_length()

    @T.prim_func
    def wait_for_counts(
        psum_per_rank: T.Tensor((num_ranks,), "int32"),
        psum_per_expert: T.Tensor((num_local,), "int32"),
        num_unaligned: T.Tensor((num_local,), "int32"),
        first_rows: T.Tensor((num_ranks, num_local), "int32"),
        host_counts: T.int64,
    ) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH)
        n = arguments.scalars(Numbers)
        if has_stats:
            stats = T.arg("stats", T.Tensor((num_local,), "int32"))
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            failed, total, tokens, size, end, start, epoch, first, missing = (
                T.alloc_var("int32", init=0) for _ in range(9)
            )
            begin = T.alloc_var("int64")
            # Each source's pairs of the thread's expert, and its tokens.
            told = T.alloc_local((num_ranks, 2), "int64")
            counts = T.alloc_local((num_ranks,), "int32")
            ends = T.alloc_shared((threads,), "int32")
            begin = nanoseconds()
            epoch = load_relaxed(flags.word(r.own, memory.EPOCH + r.op)) + 1
            if n.awaits_rows != 0:
                failed = flags.await_ranks(r, memory.flag_of(memory.ARRIVED, r.op), 1)
            else:
                failed = flags.has_failed(r)
            missing = 1 - failed
            while missing > 0:
                for s in T.unroll(num_ranks):
                    first = memory.counts_of(epoch, s, num_ranks, num_local)
                    told[s, 0] = load_told(flags.word(r.own, first + 2 * T.min(thread, num_local)))
                    told[s, 1] = load_told(flags.word(r.own, first + 2 * num_local))
                missing = 0
                for s in T.unroll(num_ranks):
                    if T.Or(T.cast(told[s, 0], "int32") != epoch, T.cast(told[s, 1], "int32") != epoch):
                        missing = 1 + s
                if missing > 0 and nanoseconds() - begin > r.limit:
                    failed = 1
                    # Its tokens cannot be here either.
                    size = load_relaxed(flags.word(r.own, memory.flag_of(memory.ARRIVED, r.op) + missing - 1))
                    fail(flags.word(r.own, memory.FAILED), r.host, r.op, missing - 1, epoch, size)
                    missing = 0
            failed = T.syncthreads_or(failed)
            for s in T.unroll(num_ranks):
                counts[s] = 0
                if thread < num_local and failed == 0:
                    counts[s] = T.cast(told[s, 0] >> T.int64(32), "int32")
                    counts[s] = T.max(T.min(counts[s], n.num_max_tokens * num_topk), 0)
                total = total + counts[s]
                if s <= thread and failed == 0:
                    size = T.cast(told[s, 1] >> T.int64(32), "int32")
                    tokens = tokens + T.max(T.min(size, n.num_max_tokens), 0)
            size = T.truncdiv(total + n.alignment - 1, n.alignment) * n.alignment
            end = size
            for step in T.unroll(steps):
                ends[thread] = end
                T.sync_threads()
                if thread >= (1 << step):
                    end = end + ends[thread - (1 << step)]
                T.sync_threads()
            start = end - size
            if host_counts != 0:
                if thread == num_ranks - 1:
                    store_on_host(host_counts, 0, tokens)
                if thread == num_local - 1:
                    store_on_host(host_counts, 1, end)
                if thread < num_local:
                    store_on_host(host_counts, 2 + thread, size)
            if thread < num_ranks:
                psum_per_rank[thread] = tokens
            if thread < num_local:
                tokens = start
                for s in T.unroll(num_ranks):
                    first_rows[s, thread] = tokens
                    tokens = tokens + counts[s]
                if do_expand:
                    # Only a token with an expert twice has pairs for which no row is left.
                    total = T.min(total, T.max(n.num_rows - start, 0))
                    psum_per_expert[thread] = T.min(start, n.num_rows) + total
                else:
                    psum_per_expert[thread] = end
                num_unaligned[thread] = total
                if has_stats and n.awaits_rows != 0:
                    stats[thread] = stats[thread] + total

    return wait_for_counts
