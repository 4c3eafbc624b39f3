"""The kernels of combine, before and after `wait`.

push_rows   a warp takes a token that dispatch has received, and sends its row, the sum of its rows, or each of its rows
            to the rank that the token is from
sum_rows    a warp takes a part of a token's channels, and sums what has come back; it never waits for another rank
"""

from typing import Any, NamedTuple

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_ep.symmetric import memory
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes, num_warps

_SUM_WARPS = 12  # With 16 a lane has 128 registers, and four terms beside a bias take more.
_PART_VECTORS = 8 * 32
"""Vectors of a part: at most 8 for each lane."""


class Sums(NamedTuple):
    """What a combine does."""

    do_expand: bool
    has_weights: bool
    sum_on_source: bool

    def places_are_ranks(self, sizes: Sizes) -> bool:
        """See memory.places_are_ranks."""
        return memory.places_are_ranks(sizes.num_ranks, sizes.num_topk, self.sum_on_source)


class PushNumbers(NamedTuple):
    """Run-time numbers of push_rows."""

    num_tokens: int
    num_rows: int
    num_max_tokens: int
    first_row: int
    num_blocks: int


class SumNumbers(NamedTuple):
    """Run-time numbers of sum_rows."""

    num_tokens: int
    num_max_tokens: int
    first_row: int
    num_blocks: int


@kernel(pass_configs=PASS_CONFIGS)
def push_rows_kernel(sizes: Sizes, hidden: int, sums: Sums, arch: Arch) -> Any:
    """x is bfloat16 (rows · hidden / 8, 8)."""
    import tilelang.language as T

    from tk_core.device.bits import count_leading_zeros
    from tk_ep.device.system import fence_bulk_copies
    from tk_ep.symmetric import arguments, flags, rows

    num_ranks, _, num_topk = sizes
    row = memory.sum_row(hidden, num_topk)
    sums_here = sums.do_expand and not sums.sum_on_source
    stage_units = rows.piece_stage_units(row) if sums_here else row.size
    warps = num_warps(stage_units * memory.UNIT, arch)
    by_rank = sums.places_are_ranks(sizes)

    @T.prim_func
    def push_rows(
        x: T.Tensor((T.dynamic("num_vectors"), rows.VECTOR), "bfloat16"),
        metadata: T.Tensor((T.dynamic("metadata_rows"), 2 + num_topk), "int32"),
        psum_per_rank: T.Tensor((num_ranks,), "int32"),
    ) -> None:
        r = arguments.ranks(num_ranks, memory.COMBINE)
        n = arguments.scalars(PushNumbers)
        if sums.has_weights:
            columns = 1 if sums.do_expand else num_topk
            weights = T.arg("weights", T.Tensor((T.dynamic("weight_rows"), columns), "int32"))

        with T.Kernel(n.num_blocks, threads=warps * 32) as block:
            s = rows.stage(warps, stage_units)
            lane = s.lane
            failed, index, source, token, last, place, at, slot, weight, first = (
                T.alloc_var("int32", init=0) for _ in range(10)
            )
            has_row, todo = T.alloc_var("uint32"), T.alloc_var("uint32")
            firsts, sent = T.alloc_local((num_topk,), "int32"), T.alloc_local((1,), "int32")
            sent[0] = 0
            failed = flags.await_ranks(r, memory.flag_of(memory.CREDIT, memory.COMBINE), 0)
            fence_bulk_copies()
            if failed == 0:
                index = s.warp * n.num_blocks + block  # Few tokens are spread over all blocks.
                while index < T.min(psum_per_rank[num_ranks - 1], n.num_tokens):
                    source = T.truncdiv(metadata[index, 0], n.num_max_tokens)
                    token = metadata[index, 0] - source * n.num_max_tokens
                    last = metadata[index, 1] - source * num_topk
                    place = r.rank if by_rank else last
                    at = -1
                    weight = 0
                    if lane < num_topk:
                        if sums.do_expand:
                            at = metadata[index, 2 + lane]
                            if at >= n.num_rows:
                                at = -1
                        if sums.has_weights:
                            if not sums.do_expand:
                                weight = weights[index, lane]
                            elif at >= 0:
                                weight = weights[at, 0]
                    has_row = T.ballot(at >= 0)
                    facts = rows.Facts(weight, T.cast(has_row, "int32"), num_topk)
                    first = n.first_row + (place * n.num_max_tokens + token) * row.size
                    if sums_here:
                        rows.find_firsts(T.if_then_else(at >= 0, at * row.values, -1), firsts)
                        rows.send_sums(s, x, row, firsts, facts, sent, r, source, first)
                    else:
                        rows.await_free(s)
                        rows.write_facts(s, row.values, facts)
                        if sums.sum_on_source:
                            T.fence_proxy_async()
                            T.sync_warp()
                            todo = has_row
                            while todo != T.uint32(0):
                                slot = 31 - count_leading_zeros(T.cast(todo, "int32"))
                                todo = todo ^ (T.uint32(1) << T.cast(slot, "uint32"))
                                first = T.shfl_sync(at, slot) * row.values
                                rows.await_free(s)
                                if lane == 0:
                                    rows.load(s, x, first, row.values)
                                rows.await_loaded(s)
                                if lane == 0:
                                    first = n.first_row + (slot * n.num_max_tokens + token) * row.size
                                    rows.send(s, 0, row.size, r, source, first)
                                T.tma_store_arrive()
                            # Which slots have rows is read at the last slot, which may have none.
                            if lane == 0 and ((has_row >> T.cast(last, "uint32")) & T.uint32(1)) == T.uint32(0):
                                first = n.first_row + (last * n.num_max_tokens + token) * row.size
                                rows.send(s, row.values, row.facts, r, source, first + row.values)
                            T.tma_store_arrive()
                        else:
                            if lane == 0:
                                rows.load(s, x, index * row.values, row.values)
                            rows.await_loaded(s)
                            T.fence_proxy_async()
                            T.sync_warp()
                            if lane == 0:
                                rows.send(s, 0, row.size, r, source, first)
                            T.tma_store_arrive()
                    index = index + n.num_blocks * warps
                T.tma_store_wait(0, read=False)
            if flags.is_last_block(r, n.num_blocks):
                flags.signal(r, memory.flag_of(memory.ARRIVED, memory.COMBINE), 1)

    return push_rows


@kernel(pass_configs=PASS_CONFIGS)
def sum_rows_kernel(sizes: Sizes, hidden: int, sums: Sums, idx_dtype: torch.dtype, num_biases: int, arch: Arch) -> Any:
    """`own` twice: as int32 and, in `vectors`, as bfloat16. After a failure combined_x is NaN. No matter do_expand."""
    import tilelang.language as T

    from tk_ep.symmetric import arguments, flags, rows

    num_ranks, num_experts, num_topk = sizes
    num_local = sizes.num_local_experts
    row = memory.sum_row(hidden, num_topk)
    num_parts = ceil_div(row.values, _PART_VECTORS)
    by_rank = sums.places_are_ranks(sizes)
    num_terms = num_topk if sums.sum_on_source else min(num_ranks, num_topk)

    @T.prim_func
    def sum_rows(
        vectors: T.Tensor((T.dynamic("vector_units"), rows.VECTOR), "bfloat16"),
        topk_idx: T.Tensor((T.dynamic("idx_rows"), num_topk), idx_dtype),
        dst_slots: T.Tensor((T.dynamic("dst_rows"), num_topk), "int32"),
        out: T.Tensor((T.dynamic("out_vectors"), rows.VECTOR), "bfloat16"),
    ) -> None:
        r = arguments.ranks(num_ranks, memory.COMBINE, waits=False)
        n = arguments.scalars(SumNumbers)
        biases = tuple(
            T.arg(f"bias_{b}", T.Tensor((T.dynamic(f"bias_{b}_vectors"), rows.VECTOR), "bfloat16"))
            for b in range(num_biases)
        )
        if sums.has_weights:
            out_weights = T.arg("out_weights", T.Tensor((T.dynamic("weight_rows"), num_topk), "int32"))

        with T.Kernel(n.num_blocks, threads=_SUM_WARPS * 32) as block:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            failed, index, token, part, home, other, last, place, has_row, first, vector, mine, weight = (
                T.alloc_var("int32", init=0) for _ in range(13)
            )
            firsts, acc = T.alloc_local((num_terms,), "int32"), rows.sums()
            width = int(acc.shape[0])
            # Where the biases' vectors of the token are, as add_vectors takes it.
            bias_first = T.alloc_local((1,), "int32")
            failed = flags.has_failed(r)
            index = warp * n.num_blocks + block
            while index < n.num_tokens * num_parts:
                token = T.truncdiv(index, num_parts)
                part = index - token * num_parts
                home = -1
                mine = -1
                if lane < num_topk:
                    if topk_idx[token, lane] >= 0 and topk_idx[token, lane] < num_experts:
                        home = T.truncdiv(T.cast(topk_idx[token, lane], "int32"), num_local)
                    mine = dst_slots[token, lane]
                last = -1
                for k in T.unroll(num_topk):
                    other = T.shfl_sync(home, k)
                    if other == home:
                        last = k
                # The row that has the facts of the lane's slot, and whether the lane has a row to add.
                place = home if by_rank else last
                first = n.first_row + (place * n.num_max_tokens + token) * row.size
                has_row = 0
                if home >= 0 and failed == 0:
                    if sums.sum_on_source:
                        at = T.cast(first + row.values, "int64") + num_topk // 4
                        has_row = (r.own[at, num_topk % 4] >> lane) & 1
                    elif mine >= 0:
                        has_row = 1
                if sums.has_weights:
                    weight = 0
                    if home >= 0 and failed == 0:
                        weight = r.own[T.cast(first + row.values, "int64") + lane // 4, lane % 4]
                    if part == 0 and lane < num_topk:
                        out_weights[token, lane] = weight
                if sums.sum_on_source:
                    first = n.first_row + (lane * n.num_max_tokens + token) * row.size
                if has_row == 0:
                    first = -1
                rows.find_firsts(first, firsts)  # Only a rank's last slot has a row, unless each has.
                bias_first[0] = token * row.values
                vector = part * _PART_VECTORS + lane
                end = T.min(row.values, (part + 1) * _PART_VECTORS)
                while vector < end:
                    for j, v in T.grid(width, rows.VECTOR):
                        acc[j, v] = T.if_then_else(failed == 0, T.float32(0), T.float32(float("nan")))
                    for b in tuple(range(num_biases)):
                        rows.add_vectors(biases[b], bias_first, vector, end, acc)
                    rows.add_vectors(vectors, firsts, vector, end, acc)
                    for j in T.unroll(width):
                        if vector + 32 * j < end:
                            for v in T.vectorized(rows.VECTOR):
                                at = T.cast(token * row.values + vector + 32 * j, "int64")
                                out[at, v] = T.cast(acc[j, v], "bfloat16")
                    vector = vector + 32 * width
                index = index + n.num_blocks * _SUM_WARPS
            if flags.is_last_block(r, n.num_blocks):
                flags.finish_call(r)

    return sum_rows
