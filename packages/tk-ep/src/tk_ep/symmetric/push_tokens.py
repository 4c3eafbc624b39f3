"""The first kernel of dispatch after `route`: each token's row to the ranks that have its experts.

A warp builds a token's row in shared memory, then sends it once to each rank, by the lane of the token's last slot
there. A rank's own tokens stay in x; only the rest of their rows is written to the rank's buffer.
"""

from typing import Any, NamedTuple

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_ep.symmetric import memory
from tk_ep.symmetric.kernels import PASS_CONFIGS, Sizes, num_warps


class Content(NamedTuple):
    """What a dispatched row has."""

    x_bytes: int
    num_factors: int
    has_weights: bool

    def layout(self, num_topk: int) -> memory.TokenRow:
        """Where it is in the row."""
        return memory.token_row(self.x_bytes, 4 * self.num_factors, num_topk)


@kernel(pass_configs=PASS_CONFIGS)
def push_tokens_kernel(sizes: Sizes, content: Content, idx_dtype: torch.dtype | None, arch: Arch) -> Any:
    """With `idx_dtype` a handle gives the routing: slots are global experts of this dtype, and no counts are sent."""
    import tilelang.language as T

    from tk_ep.device.system import fence_bulk_copies
    from tk_ep.symmetric import arguments, flags, rows

    num_ranks, num_experts, num_topk = sizes
    num_local, has_handle = sizes.num_local_experts, idx_dtype is not None
    row = content.layout(num_topk)
    first_fact = (row.data + row.sf) * 4  # word of a row
    warps = num_warps(row.size * memory.UNIT, arch)
    sf_strides = tuple(T.dynamic(f"sf_{dim}_stride", "int64") for dim in ("row", "col"))

    @T.prim_func
    def push_tokens(
        x: T.Tensor((T.dynamic("x_rows"), row.data * 4), "int32"),
        slots: T.Tensor((T.dynamic("slot_rows"), num_topk), idx_dtype or "int32"),
        dst_slots: T.Tensor((T.dynamic("dst_rows"), num_topk), "int32"),
        num_tokens: T.int32,
        num_blocks: T.int32,
    ) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH)
        if content.num_factors:
            sf = T.arg("sf", T.StridedTensor((T.dynamic("sf_rows"), content.num_factors), sf_strides, "int32"))
        if content.has_weights:
            weights = T.arg("weights", T.Tensor((T.dynamic("weight_rows"), num_topk), "int32"))
        if not has_handle:
            counts = T.arg("counts", T.Tensor((num_experts + num_ranks,), "int32"))

        with T.Kernel(num_blocks, threads=warps * 32) as block:
            s = rows.stage(warps, row.size)
            thread, lane = T.get_thread_binding(), s.lane
            failed, slot, dst, home, token, first = (T.alloc_var("int32", init=0) for _ in range(6))
            failed = flags.await_ranks(r, memory.flag_of(memory.CREDIT, memory.DISPATCH), 0)
            fence_bulk_copies()
            if failed == 0:
                token = s.warp * num_blocks + block  # Few tokens are spread over all blocks.
                while token < num_tokens:
                    slot = -1
                    dst = -1
                    if lane < num_topk:
                        dst = dst_slots[token, lane]
                        if has_handle:
                            if slots[token, lane] >= 0 and slots[token, lane] < num_experts:
                                slot = T.cast(slots[token, lane], "int32")
                        else:
                            slot = slots[token, lane]
                    home = T.truncdiv(T.truncmod(T.max(slot, 0), num_experts), num_local)
                    if T.any_sync(dst >= 0) != 0:
                        rows.await_free(s)
                        if lane == 0:
                            rows.load(s, x, token, row.data)
                            s.words[s.warp, first_fact] = token
                        if content.num_factors:
                            for j in T.unroll(ceil_div(content.num_factors, 32)):
                                if j * 32 + lane < content.num_factors:
                                    s.words[s.warp, row.data * 4 + j * 32 + lane] = sf[token, j * 32 + lane]
                        if lane < num_topk:
                            s.words[s.warp, first_fact + 1 + lane] = slot
                            if content.has_weights:
                                s.words[s.warp, first_fact + 1 + num_topk + lane] = weights[token, lane]
                        T.fence_proxy_async()
                        rows.await_loaded(s)
                        T.sync_warp()
                        if dst >= 0:
                            first = memory.FIRST_ROW + dst * row.size
                            if home == r.rank:
                                rows.store(s, row.data, row.tail, r.own, first + row.data)
                            else:
                                rows.send(s, 0, row.size, r, home, first)
                        T.tma_store_arrive()
                    token = token + num_blocks * warps
                T.tma_store_wait(0, read=False)
            if flags.is_last_block(r, num_blocks):
                if not has_handle:
                    for to in r.all_ranks:
                        for j in T.unroll(ceil_div(num_local + 1, warps * 32)):
                            index = j * warps * 32 + thread
                            if index <= num_local:
                                at = memory.COUNTS + r.rank * (num_local + 1) + index
                                source = T.if_then_else(index < num_local, to * num_local + index, num_experts + to)
                                r.peers[to][at // 4, at % 4] = counts[source]
                T.sync_threads()
                flags.signal(r, memory.flag_of(memory.ARRIVED, memory.DISPATCH), 1)

    return push_tokens
