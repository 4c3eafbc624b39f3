"""The first kernel of dispatch after `route`: each token's row to the ranks that have its experts.

A warp builds a token's row in shared memory, then sends it once to each rank, by the lane of the token's last slot
there. A rank's own tokens are not sent: receive_tokens finds them where they are.
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
    """With `idx_dtype` a handle gives the routing: slots are global experts of this dtype."""
    import tilelang.language as T

    from tk_ep.device.system import fence_bulk_copies
    from tk_ep.symmetric import arguments, flags, rows

    num_ranks, num_experts, num_topk = sizes
    row = content.layout(num_topk)
    first_fact = (row.data + row.sf) * 4  # word of a row
    warps = num_warps(row.size * memory.UNIT, arch)

    @T.prim_func
    def push_tokens(num_tokens: T.int32, num_blocks: T.int32) -> None:
        r = arguments.ranks(num_ranks, memory.DISPATCH)
        tokens = arguments.tokens(sizes, content, idx_dtype)
        with T.Kernel(num_blocks, threads=warps * 32) as block:
            s = rows.stage(warps, row.size)
            lane = s.lane
            failed, slot, dst, home, token = (T.alloc_var("int32", init=0) for _ in range(5))
            failed = flags.await_ranks(r, memory.flag_of(memory.CREDIT, memory.DISPATCH), 0)
            fence_bulk_copies()
            if failed == 0:
                token = s.warp * num_blocks + block  # Few tokens are spread over all blocks.
                while token < num_tokens:
                    slot = -1
                    dst = -1
                    if lane < num_topk:
                        dst = tokens.dst_slots[token, lane]
                        slot = tokens.slot(token, lane)
                    home = T.truncdiv(T.truncmod(T.max(slot, 0), num_experts), sizes.num_local_experts)
                    if home == r.rank:
                        dst = -1
                    if T.any_sync(dst >= 0) != 0:
                        rows.await_free(s)
                        if lane == 0:
                            rows.load(s, tokens.x, token, row.data)
                            s.words[s.warp, first_fact] = token
                        if content.num_factors:
                            for j in T.unroll(ceil_div(content.num_factors, 32)):
                                if j * 32 + lane < content.num_factors:
                                    s.words[s.warp, row.data * 4 + j * 32 + lane] = tokens.sf[token, j * 32 + lane]
                        if lane < num_topk:
                            s.words[s.warp, first_fact + 1 + lane] = slot
                            if content.has_weights:
                                s.words[s.warp, first_fact + 1 + num_topk + lane] = tokens.weights[token, lane]
                        T.fence_proxy_async()
                        rows.await_loaded(s)
                        T.sync_warp()
                        if dst >= 0:
                            rows.send(s, 0, row.size, r, home, memory.FIRST_ROW + dst * row.size)
                        T.tma_store_arrive()
                    token = token + num_blocks * warps
                T.tma_store_wait(0, read=False)
            if flags.is_last_block(r, num_blocks):
                flags.signal(r, memory.flag_of(memory.ARRIVED, memory.DISPATCH), 1)

    return push_tokens
