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
    from tk_ep.symmetric import flags, rows
    from tk_ep.symmetric.flags import Ranks

    num_ranks, num_experts, num_topk = sizes
    num_local = sizes.num_local_experts
    do_expand, do_zero_padding, has_handle = results
    row = content.layout(num_topk)
    warps = num_warps(content.x_bytes, arch)
    threads = warps * 32
    num_parts = ceil_div(content.num_factors, 32)
    num_units = T.dynamic("num_units")
    first_fact = (row.data + row.sf) * 4  # word of a row
    sf_strides = tuple(T.dynamic(f"sf_{dim}_stride", "int64") for dim in ("row", "col"))

    @T.prim_func
    def receive_tokens(
        x: T.Tensor((T.dynamic("x_rows"), row.data * 4), "int32"),
        own: T.Tensor((num_units, 4), "int32"),
        psum_per_rank: T.Tensor((num_ranks,), "int32"),
        psum_per_expert: T.Tensor((num_local,), "int32"),
        metadata: T.Tensor((T.dynamic("metadata_rows"), 2 + num_topk), "int32"),
        recv_x: T.Tensor((T.dynamic("recv_rows"), row.data * 4), "int32"),
        num_own_tokens: T.int32,
        num_tokens: T.int32,
        num_rows: T.int32,
        num_max_tokens: T.int32,
        alignment: T.int32,
        rank: T.int32,
        num_blocks: T.int32,
    ) -> None:
        peers = tuple(T.arg(f"peer_{r}", T.Tensor((num_units, 4), "int32")) for r in range(num_ranks))
        if content.num_factors:
            recv_sf = T.arg(
                "recv_sf", T.StridedTensor((T.dynamic("sf_rows"), content.num_factors), sf_strides, "int32")
            )
        if not do_expand:
            recv_idx = T.arg("recv_idx", T.Tensor((T.dynamic("idx_rows"), num_topk), idx_dtype))
        if content.has_weights:
            columns = 1 if do_expand else num_topk
            recv_weights = T.arg("recv_weights", T.Tensor((T.dynamic("weight_rows"), columns), "int32"))
        if not has_handle:
            first_rows = T.arg("first_rows", T.Tensor((num_ranks, num_local), "int32"))
            if do_expand:
                pos_to_expert = T.arg("pos_to_expert", T.Tensor((T.dynamic("expert_rows"),), "int32"))

        with T.Kernel(num_blocks, threads=threads) as block:
            s = rows.stage(warps, row.data)
            thread, warp, lane = T.get_thread_binding(), s.warp, s.lane
            ends = T.alloc_shared((num_local,), "int32")
            from_rank = T.alloc_local((num_ranks,), "int32")
            failed, index, source, first, token, slot, local, at, weight, to = (
                T.alloc_var("int32", init=0) for _ in range(10)
            )
            factors = T.alloc_local((max(num_parts, 1),), "int32")  # the lane's
            here = T.alloc_var("uint32")
            low, high, middle = (T.alloc_var("int32", init=0) for _ in range(3))
            r = Ranks(own, peers, rank, memory.DISPATCH, T.int64(0), T.int64(0))
            failed = flags.has_failed(r)
            fence_bulk_copies()
            for source_rank in T.unroll(num_ranks):
                from_rank[source_rank] = T.if_then_else(failed == 0, psum_per_rank[source_rank], 0)
            for j in T.unroll(ceil_div(num_local, threads)):
                if j * threads + thread < num_local:
                    ends[j * threads + thread] = psum_per_expert[j * threads + thread]
            T.sync_threads()

            index = warp * num_blocks + block  # Few tokens are spread over all blocks.
            while index < T.min(from_rank[num_ranks - 1], num_tokens):
                source = 0
                first = 0
                for source_rank in T.unroll(num_ranks - 1):
                    if index >= from_rank[source_rank]:
                        source = source_rank + 1
                        first = from_rank[source_rank]
                first = memory.FIRST_ROW + (source * num_max_tokens + index - first) * row.size
                first_word = T.cast(first, "int64") * 4 + first_fact
                token = T.max(T.min(own[first_word // 4, first_word % 4], num_max_tokens - 1), 0)
                slot = -1
                weight = 0
                if lane < num_topk:
                    slot = own[(first_word + 1 + lane) // 4, (first_word + 1 + lane) % 4]
                    if content.has_weights:
                        weight = own[(first_word + 1 + num_topk + lane) // 4, (first_word + 1 + num_topk + lane) % 4]
                if content.num_factors:
                    for j in T.unroll(num_parts):
                        column = j * 32 + lane
                        if column < content.num_factors:
                            factors[j] = own[T.cast(first + row.data, "int64") + column // 4, column % 4]
                local = -1
                if slot >= 0:
                    local = T.truncmod(slot, num_experts) - rank * num_local
                    if local >= num_local:
                        local = -1
                here = T.ballot(local >= 0)

                rows.await_free(s)
                if lane == 0:
                    if source == rank:
                        rows.load(s, x, T.min(token, num_own_tokens - 1), row.data)
                    else:
                        rows.load(s, own, first, row.data)

                at = -1
                if do_expand:
                    if local >= 0:
                        if has_handle:
                            at = metadata[index, 2 + lane]
                        else:
                            at = first_rows[source, local] + T.truncdiv(slot, num_experts)
                    if at >= num_rows:
                        at = -1
                    if at >= 0:
                        if content.has_weights:
                            recv_weights[at, 0] = weight
                        if not has_handle:
                            pos_to_expert[at] = local
                else:
                    if lane == 0:
                        at = index
                    if lane < num_topk:
                        recv_idx[index, lane] = T.cast(T.max(local, -1), idx_dtype)
                        if content.has_weights:
                            recv_weights[index, lane] = weight
                if not has_handle:
                    if lane == 0:
                        metadata[index, 0] = source * num_max_tokens + token
                        metadata[index, 1] = source * num_topk + 31 - count_leading_zeros(T.cast(here, "int32"))
                    if lane < num_topk:
                        metadata[index, 2 + lane] = at if do_expand else -1
                if content.num_factors:
                    for j in T.unroll(num_parts):
                        column = j * 32 + lane
                        for k in T.unroll(num_topk if do_expand else 1):
                            to = T.shfl_sync(at, k)
                            if to >= 0 and column < content.num_factors:
                                recv_sf[to, column] = factors[j]

                rows.await_loaded(s)
                if at >= 0:
                    rows.store(s, 0, row.data, recv_x, at)
                T.tma_store_arrive()
                index = index + num_blocks * warps

            # Past the received.
            index = from_rank[num_ranks - 1] + warp * num_blocks + block
            while index < num_tokens:
                if lane < 2 and not has_handle:
                    metadata[index, lane] = -1
                if lane < num_topk:
                    if not has_handle:
                        metadata[index, 2 + lane] = -1
                    if not do_expand:
                        recv_idx[index, lane] = T.cast(-1, idx_dtype)
                index = index + num_blocks * warps

            if do_expand:
                if do_zero_padding:
                    rows.clear(s)
                # Each lane looks for the expert of a row: the first that ends, with its padding, behind the row.
                index = (warp * num_blocks + block) * 32
                while index < num_rows:
                    low = 0
                    high = num_local
                    while low < high:
                        middle = (low + high) >> 1
                        if T.truncdiv(ends[middle] + alignment - 1, alignment) * alignment > index + lane:
                            high = middle
                        else:
                            low = middle + 1
                    at = 0
                    if index + lane < num_rows:
                        if low == num_local:
                            at = 1
                        else:
                            if index + lane >= ends[low]:
                                at = 2
                    if at > 0:
                        if content.has_weights:
                            recv_weights[index + lane, 0] = 0
                        if not has_handle:
                            pos_to_expert[index + lane] = -1
                    if do_zero_padding:
                        if at == 2:
                            rows.store(s, 0, row.data, recv_x, index + lane)
                            if content.num_factors:
                                for j in T.serial(content.num_factors):
                                    recv_sf[index + lane, j] = 0
                        T.tma_store_arrive()
                    index = index + num_blocks * threads

            T.tma_store_wait(0)
            if flags.is_last_block(r, num_blocks):
                flags.finish_call(r)

    return receive_tokens
