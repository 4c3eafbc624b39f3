"""The last kernel of dispatch: copies what a rank receives to new tensors, once for each of a token's rows.

A warp takes a token: one of the rank's own, which lies in x, or one that others have sent, which lies in the rank's
buffer. It brings the data into shared memory; each lane stores the row of one slot. It never waits for another rank.
One launch takes all tokens; or a first one the rank's own, while those of others are on their way, a second the rest.
"""

from typing import Any, NamedTuple

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_ep.symmetric import memory
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes, num_warps
from tk_ep.symmetric.push_tokens import Content


class Numbers(NamedTuple):
    """Run-time numbers of a launch."""

    num_own_tokens: int
    num_tokens: int
    num_rows: int
    num_max_tokens: int
    alignment: int
    num_blocks: int
    takes_own: int
    """Whether this launch takes the rank's own tokens, and marks tokens and rows that there are not"""
    takes_others: int
    """Whether it takes those of other ranks, and ends the call"""


class Results(NamedTuple):
    """What dispatch returns."""

    do_expand: bool
    do_zero_padding: bool
    has_handle: bool
    """Whether a handle has the routing, which is read, not written"""


@kernel(pass_configs=PASS_CONFIGS)
def receive_tokens_kernel(sizes: Sizes, content: Content, idx_dtype: torch.dtype, results: Results, arch: Arch) -> Any:
    """Write recv_x (as int32), factors, experts and weights, and without a handle its fields of received tokens."""
    import tilelang.language as T

    from tk_core.device.bits import count_leading_zeros
    from tk_ep.device.system import fence_bulk_copies
    from tk_ep.symmetric import arguments, flags, received, rows

    num_ranks, num_experts, num_topk = sizes
    num_local = sizes.num_local_experts
    do_expand, has_handle = results.do_expand, results.has_handle
    row = content.layout(num_topk)
    warps = num_warps(content.x_bytes, arch)
    threads = warps * 32
    num_parts = ceil_div(content.num_factors, 32)
    first_fact = (row.data + row.sf) * 4  # word of a row

    @T.prim_func
    def receive_tokens(
        psum_per_rank: T.Tensor((num_ranks,), "int32"),
        psum_per_expert: T.Tensor((num_local,), "int32"),
    ) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH, waits=False)
        n = arguments.scalars(Numbers)
        tokens = arguments.tokens(sizes, content, idx_dtype if has_handle else None)
        out = received.outputs(sizes, content, idx_dtype, results)

        with T.Kernel(n.num_blocks, threads=threads) as block:
            s = rows.stage(warps, row.data)
            thread, warp, lane = T.get_thread_binding(), s.warp, s.lane
            ends = T.alloc_shared((num_local,), "int32")
            from_rank = T.alloc_local((num_ranks,), "int32")
            failed, number, index, source, first, token, dst, slot, local, at, weight = (
                T.alloc_var("int32", init=0) for _ in range(11)
            )
            num_own_tokens, num_others, first_own, num_own = (T.alloc_var("int32", init=0) for _ in range(4))
            factors = T.alloc_local((max(num_parts, 1),), "int32")  # the lane's
            here, mine = T.alloc_var("uint32"), T.alloc_var("uint32")
            failed = flags.has_failed(r)
            fence_bulk_copies()
            for source_rank in T.unroll(num_ranks):
                from_rank[source_rank] = T.if_then_else(failed == 0, psum_per_rank[source_rank], 0)
            for j in T.unroll(ceil_div(num_local, threads)):
                if j * threads + thread < num_local:
                    ends[j * threads + thread] = psum_per_expert[j * threads + thread]
            T.sync_threads()
            if failed == 0:
                if r.rank > 0:
                    first_own = psum_per_rank[r.rank - 1]
                num_own = psum_per_rank[r.rank] - first_own
                num_own_tokens = n.num_own_tokens * n.takes_own
                num_others = (from_rank[num_ranks - 1] - num_own) * n.takes_others

            number = warp * n.num_blocks + block  # Few tokens are spread over all blocks.
            while number < num_own_tokens + num_others:
                slot = -1
                weight = 0
                dst = -1
                if number < num_own_tokens:
                    source = r.rank
                    token = number
                    if lane < num_topk:
                        dst = tokens.dst_slots[token, lane]
                        slot = tokens.slot(token, lane)
                        if content.has_weights:
                            weight = tokens.weights[token, lane]
                    if content.num_factors:
                        for j in T.unroll(num_parts):
                            column = j * 32 + lane
                            if column < content.num_factors:
                                factors[j] = tokens.sf[token, column]
                else:
                    index = number - num_own_tokens
                    if index >= first_own:
                        index = index + num_own
                    source = 0
                    first = 0
                    for source_rank in T.unroll(num_ranks - 1):
                        if index >= from_rank[source_rank]:
                            source = source_rank + 1
                            first = from_rank[source_rank]
                    first = memory.FIRST_ROW + (source * n.num_max_tokens + index - first) * row.size
                    first_word = T.cast(first, "int64") * 4 + first_fact
                    token = T.max(T.min(r.own[first_word // 4, first_word % 4], n.num_max_tokens - 1), 0)
                    if lane < num_topk:
                        slot = r.own[(first_word + 1 + lane) // 4, (first_word + 1 + lane) % 4]
                        if content.has_weights:
                            word = first_word + 1 + num_topk + lane
                            weight = r.own[word // 4, word % 4]
                    if content.num_factors:
                        for j in T.unroll(num_parts):
                            column = j * 32 + lane
                            if column < content.num_factors:
                                factors[j] = r.own[T.cast(first + row.data, "int64") + column // 4, column % 4]
                local = -1
                if slot >= 0:
                    local = T.truncmod(slot, num_experts) - r.rank * num_local
                    if local >= num_local:
                        local = -1
                here = T.ballot(local >= 0)
                if number < num_own_tokens:
                    # Where the token is among those for this rank: the last of its slots here knows.
                    index = -1
                    mine = T.ballot(T.And(dst >= 0, local >= 0))
                    if mine != T.uint32(0):
                        index = T.shfl_sync(dst, 31 - count_leading_zeros(T.cast(mine, "int32")))
                        index = first_own + index - r.rank * n.num_max_tokens

                if index >= 0 and index < n.num_tokens:
                    rows.await_free(s)
                    if lane == 0:
                        if source == r.rank:
                            rows.load(s, tokens.x, token, row.data)
                        else:
                            rows.load(s, r.own, first, row.data)

                    at = -1
                    if do_expand:
                        if local >= 0:
                            if has_handle:
                                at = out.metadata[index, 2 + lane]
                            else:
                                at = out.first_rows[source, local] + T.truncdiv(slot, num_experts)
                        if at >= n.num_rows:
                            at = -1
                    elif lane == 0:
                        at = index
                    last = source * num_topk + 31 - count_leading_zeros(T.cast(here, "int32"))
                    facts = received.Facts(source * n.num_max_tokens + token, last, local, weight)
                    received.write_token(out, index, at, lane, facts, factors)

                    rows.await_loaded(s)
                    if at >= 0:
                        rows.store(s, 0, row.data, out.x, at)
                    T.tma_store_arrive()
                number = number + n.num_blocks * warps

            if n.takes_own != 0 or failed != 0:
                number = warp * n.num_blocks + block
                received.clear_tokens(out, n, from_rank[num_ranks - 1] + number, n.num_blocks * warps, lane)
                if do_expand:
                    received.clear_rows(out, s, ends, n, number, n.num_blocks * warps, results.do_zero_padding)

            T.tma_store_wait(0)
            if n.takes_others != 0:
                is_last = flags.is_last_block(r, n.num_blocks)
                if is_last != 0:
                    flags.finish_call(r)

    return receive_tokens
