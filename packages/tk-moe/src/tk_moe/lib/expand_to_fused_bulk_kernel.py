"""The kernel of expand_to_fused with bulk copies, for many long rows; expand_to_fused.py describes the tiling."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_moe.device.async_copy import (
    bulk_load,
    bulk_store,
    expect_bytes,
    init_mbarrier,
    wait_for_bulk_loads,
    wait_for_bulk_stores,
)

_KIB = 1024
_BARRIER_BYTES = 128


@dataclass(frozen=True)
class BulkConfig:
    """How one thread block copies its part of x."""

    pieces_per_row: int
    """Number of pieces of equal size in which a row is copied."""
    stages: int
    """Pieces that fit in a thread block's shared memory; at most 32, as each lane loads one."""

    threads = 128
    """One warp copies, the others zero padding."""
    blocks_per_sm = 3
    min_piece_bytes, max_piece_bytes = 2 * _KIB, 4 * _KIB

    @staticmethod
    @cache
    def best(row_bytes: int, arch: Arch) -> "BulkConfig | None":
        """Large pieces, as many as fit; None where bulk copies are slower or no piece of good size divides a row.

        Measured on an H200 for rows of 2 KiB and more. Long phases of reading need a large shared memory.
        """
        has_room = arch.has_tma and arch.max_shared_memory >= 200 * _KIB
        if not has_room or row_bytes < BulkConfig.max_piece_bytes or row_bytes % 16:
            return None
        counts = range(ceil_div(row_bytes, BulkConfig.max_piece_bytes), row_bytes // BulkConfig.min_piece_bytes + 1)
        pieces_per_row = next((count for count in counts if row_bytes // 16 % count == 0), None)
        if pieces_per_row is None:
            return None
        # CUDA reserves 1 KiB of shared memory per thread block.
        room = (arch.max_shared_memory + _KIB) // BulkConfig.blocks_per_sm - _KIB - _BARRIER_BYTES
        return BulkConfig(pieces_per_row, min(room // (row_bytes // pieces_per_row), 32))

    @staticmethod
    def pays(num_tokens: int, num_topk: int, num_expanded_tokens: int) -> bool:
        """Whether there are enough tokens to fill all thread blocks, and not too many rows of padding."""
        return num_tokens >= 1024 and num_expanded_tokens <= 2 * num_tokens * num_topk

    def deal(self, num_tokens: int, num_sms: int) -> tuple[int, int]:
        """`(num_blocks, pieces_per_block)`, the latter at most; SMs get equal shares, in full waves."""
        num_pieces, slots = num_tokens * self.pieces_per_row, num_sms * self.blocks_per_sm
        pieces_per_block = ceil_div(num_pieces, slots * ceil_div(num_pieces, slots * self.stages))
        return ceil_div(num_pieces, pieces_per_block), pieces_per_block


# Every access has a guard of its own, and the one barrier that is needed is written out.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True})
def expand_bulk_kernel(cols: int, num_topk: int, dtype: torch.dtype, config: BulkConfig, arch: Arch) -> Any:
    """Copy rows of `cols` elements; rows of x and out are multiples of 16 bytes and aligned to 16 bytes."""
    import tilelang.language as T

    threads, stages, pieces_per_row = config.threads, config.stages, config.pieces_per_row
    row_words = cols * dtype.itemsize // 4
    piece_words = row_words // pieces_per_row
    stores_per_lane = ceil_div(stages * num_topk, 32)
    zeroing_threads = threads - 32

    num_tokens = T.dynamic("num_tokens")
    num_expanded_tokens = T.dynamic("num_expanded_tokens")

    @T.macro
    def copy_pieces(
        block: T.int32,
        num_blocks: T.int32,
        pieces_per_block: T.int32,
        lane: T.int32,
        x_words: T.Buffer,
        token_topk_to_pos: T.Buffer,
        out_words: T.Buffer,
        loaded: T.Buffer,
    ) -> None:
        pieces = T.alloc_shared((stages, piece_words), "uint32")
        pos = T.alloc_local((stores_per_lane,), "int32")
        count = T.alloc_var("int32")
        # This block copies the pieces block + i * num_blocks of x for i < count.
        count = T.min(pieces_per_block, T.ceildiv(num_tokens * pieces_per_row - block, num_blocks))
        if lane == 0:
            expect_bytes(T.access_ptr(loaded[0], "rw"), count * piece_words * 4)
        T.sync_warp()
        if lane < count:
            piece = block + lane * num_blocks
            bulk_load(
                T.access_ptr(pieces[lane, 0], "w"),
                T.access_ptr(x_words[piece // pieces_per_row, piece % pieces_per_row * piece_words], "r"),
                piece_words * 4,
                T.access_ptr(loaded[0], "rw"),
            )
        for j in T.unroll(stores_per_lane):
            stage = (j * 32 + lane) // num_topk
            pos[j] = -1
            if stage < count:
                pos[j] = token_topk_to_pos[(block + stage * num_blocks) // pieces_per_row, (j * 32 + lane) % num_topk]
        wait_for_bulk_loads(T.access_ptr(loaded[0], "rw"))
        for j in T.unroll(stores_per_lane):
            if pos[j] >= 0 and pos[j] < num_expanded_tokens:
                stage = (j * 32 + lane) // num_topk
                column = (block + stage * num_blocks) % pieces_per_row * piece_words
                bulk_store(
                    T.access_ptr(out_words[pos[j], column], "w"),
                    T.access_ptr(pieces[stage, 0], "r"),
                    piece_words * 4,
                )
        wait_for_bulk_stores()

    @T.macro
    def zero_padding(
        block: T.int32, num_blocks: T.int32, tx: T.int32, pos_to_expert: T.Buffer, out_words: T.Buffer
    ) -> None:
        expert = T.alloc_var("int32")
        padding = T.alloc_var("uint32")
        for i in T.serial(T.ceildiv(num_expanded_tokens - block, num_blocks * 32)):
            # Each lane checks row block + (i * 32 + lane) * num_blocks; every warp checks all 32 rows for itself.
            expert = 0
            if block + (i * 32 + tx % 32) * num_blocks < num_expanded_tokens:
                expert = pos_to_expert[block + (i * 32 + tx % 32) * num_blocks]
            padding = T.cast(T.ballot(expert < 0), "uint32")
            for lane in T.serial(32):
                if (padding >> T.cast(lane, "uint32")) & T.uint32(1) != T.uint32(0):
                    for j in T.serial(ceil_div(row_words // 4, zeroing_threads)):
                        if j * zeroing_threads + tx < row_words // 4:
                            for v in T.vectorized(4):
                                out_words[block + (i * 32 + lane) * num_blocks, (j * zeroing_threads + tx) * 4 + v] = (
                                    T.uint32(0)
                                )

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
            x_words = T.view(x, (num_tokens, row_words), "uint32")
            out_words = T.view(out, (num_expanded_tokens, row_words), "uint32")
            # 128 bytes, so that the pieces, which come next, are aligned: with 16 bytes 202 µs instead of 134.
            loaded = T.alloc_shared((_BARRIER_BYTES // 8,), "uint64")
            if tx == 0:
                init_mbarrier(T.access_ptr(loaded[0], "rw"))
            T.sync_threads()
            if tx < 32:
                copy_pieces(block, num_blocks, pieces_per_block, tx, x_words, token_topk_to_pos, out_words, loaded)
            else:
                zero_padding(block, num_blocks, tx - 32, pos_to_expert, out_words)

    return expand_to_fused_bulk
