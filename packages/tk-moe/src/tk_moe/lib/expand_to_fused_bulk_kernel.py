"""The bulk-copy kernel of expand_to_fused, for many long rows; expand_to_fused.py describes the tiling."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.tiles import DIRECT_COPIES
from tk_moe.device.async_copy import bulk_store

_KIB = 1024


@dataclass(frozen=True)
class BulkConfig:
    """How one thread block copies its part of x."""

    pieces_per_row: int
    """Pieces of equal size that a row is split into; each is one bulk copy."""
    stages: int
    """Pieces that a thread block holds in shared memory: at most one per thread, since thread i loads piece i."""

    threads = 128
    blocks_per_sm = 3
    max_padding_rows = 32
    """Rows that a thread block checks for padding at a time."""
    min_piece_bytes, max_piece_bytes = 2 * _KIB, 4 * _KIB

    @staticmethod
    @cache
    def best(row_bytes: int, arch: Arch) -> "BulkConfig | None":
        """The configuration for rows of `row_bytes`; None if bulk copies are slower or no piece size fits.

        Pieces are as large as possible, from 2 to 4 KiB, with as many stages as fit. Measured on an H200 for rows of
        2 KiB and more. Long phases of reading need a large shared memory.
        """
        has_room = arch.has_tma and arch.max_shared_memory >= 200 * _KIB
        if not has_room or row_bytes < BulkConfig.max_piece_bytes or row_bytes % 16:
            return None
        counts = range(ceil_div(row_bytes, BulkConfig.max_piece_bytes), row_bytes // BulkConfig.min_piece_bytes + 1)
        pieces_per_row = next((count for count in counts if row_bytes // 16 % count == 0), None)
        if pieces_per_row is None:
            return None
        room = arch.shared_memory_each(BulkConfig.blocks_per_sm) - _KIB  # for the barrier and the experts
        return BulkConfig(pieces_per_row, min(room // (row_bytes // pieces_per_row), 32))

    @staticmethod
    def pays(num_tokens: int, num_topk: int, num_expanded_tokens: int) -> bool:
        """Whether there are enough tokens to fill all thread blocks, and at most two rows per (token, slot) pair."""
        return num_tokens >= 1024 and num_expanded_tokens <= 2 * num_tokens * num_topk

    def split(self, num_tokens: int, num_sms: int) -> tuple[int, int]:
        """`(num_blocks, most pieces of a block)`: the blocks run in full waves, with equal shares of the pieces."""
        num_pieces, slots = num_tokens * self.pieces_per_row, num_sms * self.blocks_per_sm
        pieces_per_block = ceil_div(num_pieces, slots * ceil_div(num_pieces, slots * self.stages))
        return ceil_div(num_pieces, pieces_per_block), pieces_per_block


@kernel(pass_configs=DIRECT_COPIES)
def expand_bulk_kernel(cols: int, num_topk: int, dtype: torch.dtype, config: BulkConfig, arch: Arch) -> Any:
    """Copy rows of `cols` elements; rows of x and out are multiples of 16 bytes and aligned to 16 bytes."""
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import load_experts, zero_padding

    threads, stages, pieces_per_row = config.threads, config.stages, config.pieces_per_row
    piece = cols // pieces_per_row
    piece_bytes = piece * dtype.itemsize
    stores_per_thread = ceil_div(stages * num_topk, threads)
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")

    @T.prim_func
    def expand_to_fused_bulk(
        x: T.Tensor((num_tokens, cols), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        num_blocks: T.int32,
        pieces_per_block: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            tx = T.get_thread_binding()
            pieces = T.alloc_shared((stages, piece), dtype)
            loaded = T.alloc_barrier(1)
            pos = T.alloc_local((stores_per_thread,), "int32")
            experts = T.alloc_fragment((config.max_padding_rows,), "int32")
            shared_experts = T.alloc_shared((config.max_padding_rows,), "int32")
            zeros = T.alloc_fragment((threads * 16 // dtype.itemsize,), dtype)
            # This block copies the pieces block + i * num_blocks of x for i < count.
            count = T.alloc_var("int32")
            count = T.min(pieces_per_block, T.ceildiv(num_tokens * pieces_per_row - block, num_blocks))
            if tx == 0:
                T.mbarrier_arrive_expect_tx(loaded, count * piece_bytes)
            if tx < count:
                index = block + tx * num_blocks
                source = x[index // pieces_per_row, index % pieces_per_row * piece]
                T.tma_load(T.access_ptr(pieces[tx, 0], "w"), T.access_ptr(source, "r"), loaded[0], piece_bytes, 0)
            for j in T.unroll(stores_per_thread):
                stage, k = (j * threads + tx) // num_topk, (j * threads + tx) % num_topk
                pos[j] = -1
                if stage < count:
                    pos[j] = token_topk_to_pos[(block + stage * num_blocks) // pieces_per_row, k]
            for i in T.serial(T.ceildiv(num_expanded_tokens - block, num_blocks * config.max_padding_rows)):
                first_row = block + i * config.max_padding_rows * num_blocks
                load_experts(pos_to_expert, first_row, num_blocks, experts)
                T.copy(experts, shared_experts)
                zero_padding(shared_experts, first_row, num_blocks, zeros, out)
            T.mbarrier_wait_parity(loaded, 0)
            for j in T.unroll(stores_per_thread):
                if pos[j] >= 0 and pos[j] < num_expanded_tokens:
                    stage = (j * threads + tx) // num_topk
                    destination = out[pos[j], (block + stage * num_blocks) % pieces_per_row * piece]
                    bulk_store(T.access_ptr(destination, "w"), T.access_ptr(pieces[stage, 0], "r"), piece_bytes)
            T.tma_store_arrive()
            T.tma_store_wait(0)

    return expand_to_fused_bulk
