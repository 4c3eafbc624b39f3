"""The last kernel of dispatch: copies what has arrived to new tensors, once for each of a token's rows.

A warp takes a received token: it brings the data into shared memory, from the rank's buffer or, if the token is its
own, from x; each lane stores the row of one slot. It never waits for another rank.
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
        x: T.Tensor((T.dynamic("x_rows"), row.data * 4), "int32"),
        psum_per_rank: T.Tensor((num_ranks,), "int32"),
        psum_per_expert: T.Tensor((num_local,), "int32"),
    ) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH, waits=False)
        n = arguments.scalars(Numbers)
        out = received.outputs(sizes, content, idx_dtype, results)

        with T.Kernel(n.num_blocks, threads=threads) as block:
            s = rows.stage(warps, row.data)
            thread, warp, lane = T.get_thread_binding(), s.warp, s.lane
            ends = T.alloc_shared((num_local,), "int32")
            from_rank = T.alloc_local((num_ranks,), "int32")
            failed, index, source, first, token, slot, local, at, weight, to = (
                T.alloc_var("int32", init=0) for _ in range(10)
            )
            factors = T.alloc_local((max(num_parts, 1),), "int32")  # the lane's
            here = T.alloc_var("uint32")
            failed = flags.has_failed(r)
            fence_bulk_copies()
            for source_rank in T.unroll(num_ranks):
                from_rank[source_rank] = T.if_then_else(failed == 0, psum_per_rank[source_rank], 0)
            for j in T.unroll(ceil_div(num_local, threads)):
                if j * threads + thread < num_local:
                    ends[j * threads + thread] = psum_per_expert[j * threads + thread]
            T.sync_threads()

            index = warp * n.num_blocks + block  # Few tokens are spread over all blocks.
            while index < T.min(from_rank[num_ranks - 1], n.num_tokens):
                source = 0
                first = 0
                for source_rank in T.unroll(num_ranks - 1):
                    if index >= from_rank[source_rank]:
                        source = source_rank + 1
                        first = from_rank[source_rank]
                first = memory.FIRST_ROW + (source * n.num_max_tokens + index - first) * row.size
                first_word = T.cast(first, "int64") * 4 + first_fact
                token = T.max(T.min(r.own[first_word // 4, first_word % 4], n.num_max_tokens - 1), 0)
                slot = -1
                weight = 0
                if lane < num_topk:
                    slot = r.own[(first_word + 1 + lane) // 4, (first_word + 1 + lane) % 4]
                    if content.has_weights:
                        weight = r.own[(first_word + 1 + num_topk + lane) // 4, (first_word + 1 + num_topk + lane) % 4]
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

                rows.await_free(s)
                if lane == 0:
                    if source == r.rank:
                        rows.load(s, x, T.min(token, n.num_own_tokens - 1), row.data)
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
                    if at >= 0:
                        if content.has_weights:
                            out.weights[at, 0] = weight
                        if not has_handle:
                            out.pos_to_expert[at] = local
                else:
                    if lane == 0:
                        at = index
                    if lane < num_topk:
                        out.idx[index, lane] = T.cast(T.max(local, -1), idx_dtype)
                        if content.has_weights:
                            out.weights[index, lane] = weight
                if not has_handle:
                    if lane == 0:
                        out.metadata[index, 0] = source * n.num_max_tokens + token
                        out.metadata[index, 1] = source * num_topk + 31 - count_leading_zeros(T.cast(here, "int32"))
                    if lane < num_topk:
                        out.metadata[index, 2 + lane] = at if do_expand else -1
                if content.num_factors:
                    for j in T.unroll(num_parts):
                        column = j * 32 + lane
                        for k in T.unroll(num_topk if do_expand else 1):
                            to = T.shfl_sync(at, k)
                            if to >= 0 and column < content.num_factors:
                                out.sf[to, column] = factors[j]

                rows.await_loaded(s)
                if at >= 0:
                    rows.store(s, 0, row.data, out.x, at)
                T.tma_store_arrive()
                index = index + n.num_blocks * warps

            index = from_rank[num_ranks - 1] + warp * n.num_blocks + block
            while index < n.num_tokens:
                received.clear_token(out, index, lane)
                index = index + n.num_blocks * warps

            if do_expand:
                if results.do_zero_padding:
                    rows.clear(s)
                index = (warp * n.num_blocks + block) * 32
                while index < n.num_rows:
                    received.clear_rows(out, s, ends, n, index, results.do_zero_padding)
                    index = index + n.num_blocks * threads

            T.tma_store_wait(0)
            if flags.is_last_block(r, n.num_blocks):
                flags.finish_call(r)

    return receive_tokens
