"""The kernel of expand_to_fused_with_sf where separate thread blocks gather the scale factors."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.tiles import DIRECT_COPIES
from tk_moe.lib.expand_to_fused_kernel import ExpandConfig, vector_of


@dataclass(frozen=True)
class GatherConfig:
    """How the separate thread blocks gather the scale factors; their threads are those of the row's ExpandConfig."""

    max_rows: int
    """Most rows of one thread block; each takes 4 bytes of shared memory."""
    columns_per_lane: int
    """Columns that a lane holds in registers at a time."""
    column_warps: int
    """Warps that share a tile's columns; the others take further rows."""
    pairs_in_flight: int
    """Positions that a thread loads before it compares the first."""

    @staticmethod
    @cache
    def best(sf_cols: int, is_col_major: bool, warps: int, arch: Arch) -> "GatherConfig | None":
        """None where rows copy their own factors: for few columns, searching for tokens costs more.

        Of the ways to share a tile's columns among the warps, one whose tiles fit the columns best.
        """
        if not is_col_major or sf_cols <= 8:
            return None
        divisors = [count for count in range(1, warps + 1) if warps % count == 0]
        ways = [(columns, column_warps) for columns in (4, 8, 16) for column_warps in divisors]
        columns, column_warps = min(ways, key=lambda way: (align(sf_cols, way[0] * way[1]), -way[0], -way[1]))
        return GatherConfig(2048, columns, column_warps, 32)

    def num_rows(self, num_expanded_tokens: int, num_sms: int) -> int:
        """Rows of a thread block, of which there is about one per SM, since each searches all positions."""
        return min(align(ceil_div(num_expanded_tokens, num_sms), 32), self.max_rows)


@kernel(pass_configs=DIRECT_COPIES)
def expand_gathered_kernel(
    cols: int,
    num_topk: int,
    dtype: torch.dtype,
    sf_cols: int,
    sf_dtype: torch.dtype,
    config: ExpandConfig,
    gather: GatherConfig,
    arch: Arch,
) -> Any:
    """Copy rows of `cols` elements; the first thread blocks gather columns of their `sf_cols` scale factors instead."""
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import copy_row, load_experts, load_positions, vectors_of_threads, zero_padding

    threads, vector = config.threads, vector_of(cols, dtype.itemsize)
    block_channels = threads * config.vectors_per_thread * vector
    block_pairs, lane_columns = gather.pairs_in_flight * threads, gather.columns_per_lane
    column_warps = gather.column_warps
    block_rows, block_columns = threads // 32 // column_warps * 32, lane_columns * column_warps
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")
    out_sf_strides = (1, T.dynamic("out_sf_col_stride"))

    def place(row: Any, column: Any) -> tuple[Any, Any]:
        return (row // 32 * column_warps + column // lane_columns) * 32 + row % 32, column % lane_columns

    @T.macro
    def find_tokens(pairs: T.Buffer, first_row: Any, num_rows: Any, token_of_row: T.Buffer) -> None:
        """The token of each of the block's rows; -1 for padding."""
        found = T.alloc_fragment((block_pairs,), "int32")
        T.annotate_layout({found: vectors_of_threads(found.shape, 4, threads)})
        T.fill(token_of_row, -1)
        for batch in T.serial(T.ceildiv(pairs.shape[0], block_pairs)):
            for i in T.Parallel(block_pairs):
                pair = batch * block_pairs + i
                found[i] = T.if_then_else(pair < pairs.shape[0], pairs[pair], -1)
            for i in T.Parallel(block_pairs):
                if found[i] >= first_row and found[i] < first_row + num_rows:
                    token_of_row[found[i] - first_row] = (batch * block_pairs + i) // num_topk

    @T.macro
    def gather_factors(token_of_row: T.Buffer, first_row: Any, num_rows: Any, sf: T.Buffer, out_sf: T.Buffer) -> None:
        """A lane takes a row and some of its columns, so that a warp stores 32 consecutive factors of a column."""
        factors = T.alloc_fragment((block_rows, block_columns), sf_dtype)
        T.annotate_layout({factors: T.Fragment(factors.shape, forward_fn=place)})
        for tile, part in T.grid(T.ceildiv(num_rows, block_rows), ceil_div(sf_cols, block_columns)):
            for r, c in T.Parallel(block_rows, block_columns):
                column, is_row = part * block_columns + c, tile * block_rows + r < num_rows
                token = T.if_then_else(is_row, token_of_row[tile * block_rows + r], -1)
                is_read = token >= 0 and column < sf_cols
                factors[r, c] = T.if_then_else(is_read, sf[token, column], T.cast(0, sf_dtype))
            for r, c in T.Parallel(block_rows, block_columns):
                if tile * block_rows + r < num_rows and part * block_columns + c < sf_cols:
                    out_sf[first_row + tile * block_rows + r, part * block_columns + c] = factors[r, c]

    @T.prim_func
    def expand_to_fused_gathered(
        x: T.Tensor((num_tokens, cols), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        num_blocks: T.int32,
        sf: T.Tensor((num_tokens, sf_cols), sf_dtype),
        out_sf: T.StridedTensor((num_expanded_tokens, sf_cols), out_sf_strides, sf_dtype),
        num_gathering_blocks: T.int32,
        gathered_rows: T.int32,
    ) -> None:
        with T.Kernel(num_gathering_blocks + num_blocks, threads=threads) as index:
            if index < num_gathering_blocks:
                first_row = index * gathered_rows
                num_rows = T.min(gathered_rows, num_expanded_tokens - first_row)
                token_of_row = T.alloc_shared((align(gather.max_rows, threads),), "int32")
                pairs = T.view(token_topk_to_pos, (num_tokens * num_topk,), "int32")
                find_tokens(pairs, first_row, num_rows, token_of_row)
                gather_factors(token_of_row, first_row, num_rows, sf, out_sf)
            else:
                block = index - num_gathering_blocks
                pos = T.alloc_local((num_topk,), "int32")
                channels = T.alloc_fragment((block_channels,), dtype)
                experts = T.alloc_fragment((config.max_padding_rows,), "int32")
                shared_experts = T.alloc_shared((config.max_padding_rows,), "int32")
                T.annotate_layout({channels: vectors_of_threads(channels.shape, vector, threads)})
                load_experts(pos_to_expert, block, num_blocks, experts)
                if block < num_tokens:
                    load_positions(token_topk_to_pos, block, num_expanded_tokens, pos)
                    copy_row(x, block, pos, channels, out)
                T.copy(experts, shared_experts)
                zero_padding(shared_experts, block, num_blocks, channels, out)

    return expand_to_fused_gathered
