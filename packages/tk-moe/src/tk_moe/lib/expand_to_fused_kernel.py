"""The kernels of expand_to_fused and expand_to_fused_with_sf; expand_to_fused.py describes the tiling."""

import math
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.tiles import DIRECT_COPIES

_VECTOR_BYTES = 16


PADDING_ROWS = 8
"""Rows that one thread block checks for padding."""


def num_blocks_for(num_tokens: int, num_expanded_tokens: int) -> int:
    """Blocks for all tokens, or more to share padding: at least one per 8 rows, and one per 2 rows up to 2048."""
    enough = ceil_div(num_expanded_tokens, PADDING_ROWS)
    return max(num_tokens, min(ceil_div(num_expanded_tokens, 2), 2048), enough)


@kernel(pass_configs=DIRECT_COPIES)
def expand_kernel(
    cols: int,
    num_topk: int,
    dtype: torch.dtype,
    sf_cols: int,
    sf_dtype: torch.dtype | None,
    writes_tokens: bool,
    arch: Arch,
) -> Any:
    """Copy rows of `cols` elements and, unless `sf_dtype` is None, their `sf_cols` scale factors.

    With `writes_tokens`, out_sf gets 1 + the token of a row instead of its factors, or 0 for a row of padding.
    """
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import copy_row, load_experts, load_positions, vectors_of_threads, zero_padding

    has_sf, factor_dtype = sf_dtype is not None, sf_dtype or torch.float32
    # The widest vector, up to 16 bytes, that divides a row.
    vector = math.gcd(cols, _VECTOR_BYTES // dtype.itemsize)
    num_vectors = cols // vector
    # Up to four vectors a thread at a time, and up to 256 threads. Rows with factors are short, and get more threads.
    chunk = ceil_div(num_vectors, ceil_div(num_vectors, 256 * 4))
    vectors_per_thread = ceil_div(chunk, 256) if has_sf else min(4, ceil_div(chunk, 32))
    threads = align(ceil_div(chunk, vectors_per_thread), 32)
    block_channels, block_sf = threads * vectors_per_thread * vector, align(max(sf_cols, 1), threads)
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")
    out_sf_strides = tuple(T.dynamic(f"out_sf_{dim}_stride", "int64") for dim in ("row", "col"))

    @T.prim_func
    def expand_to_fused(
        x: T.Tensor((num_tokens, cols), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        num_blocks: T.int32,
    ) -> None:
        if has_sf:
            sf = T.arg("sf", T.Tensor((num_tokens, sf_cols), sf_dtype))
            out_sf = T.arg("out_sf", T.StridedTensor((num_expanded_tokens, sf_cols), out_sf_strides, sf_dtype))

        with T.Kernel(num_blocks, threads=threads) as block:
            pos = T.alloc_local((num_topk,), "int32")
            channels = T.alloc_fragment((block_channels,), dtype)
            factors = T.alloc_fragment((block_sf,), factor_dtype)
            experts = T.alloc_fragment((PADDING_ROWS,), "int32")
            shared_experts = T.alloc_shared((PADDING_ROWS,), "int32")
            T.annotate_layout({channels: vectors_of_threads(channels.shape, vector, threads)})
            T.annotate_layout({factors: vectors_of_threads(factors.shape, 1, threads)})
            load_experts(pos_to_expert, block, num_blocks, experts)
            if block < num_tokens:
                load_positions(token_topk_to_pos, block, num_expanded_tokens, pos)
                if writes_tokens:
                    T.fill(factors, block + 1)
                elif has_sf:
                    T.copy(sf[block, 0:block_sf], factors)
                copy_row(x, block, pos, channels, out)
                if has_sf:
                    for k in T.unroll(num_topk):
                        if pos[k] >= 0:
                            T.copy(factors, out_sf[pos[k], 0:block_sf])
            T.copy(experts, shared_experts)
            zero_padding(shared_experts, block, num_blocks, channels, out)
            if has_sf:
                zero_padding(shared_experts, block, num_blocks, factors, out_sf)

    return expand_to_fused


@kernel(pass_configs=DIRECT_COPIES)
def gather_factors_kernel(sf_cols: int, sf_dtype: torch.dtype, arch: Arch) -> Any:
    """Gather the scale factors of each row from row-major sf into column-major out, in tiles of 64 rows by 32 columns.

    `tokens` holds 1 + the token of each row, or 0 for a row of padding, whose factors become 0.
    """
    import tilelang.language as T

    num_tokens, num_rows = T.dynamic("num_tokens"), T.dynamic("num_rows")

    @T.prim_func
    def gather_factors(
        sf: T.Tensor((num_tokens, sf_cols), sf_dtype),
        tokens: T.Tensor((num_rows, 1), "int32"),
        out: T.StridedTensor((num_rows, sf_cols), (1, T.dynamic("out_col_stride", "int64")), sf_dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, 64), ceil_div(sf_cols, 32), threads=256) as (block, part):
            tile = T.alloc_shared((64, 33), sf_dtype)  # 33, so that a column is read without bank conflicts
            for r, c in T.Parallel(64, 32):
                row, col = block * 64 + r, part * 32 + c
                if row < num_rows and col < sf_cols:
                    tile[r, c] = T.if_then_else(tokens[row, 0] > 0, sf[tokens[row, 0] - 1, col], T.cast(0, sf_dtype))
            for c, r in T.Parallel(32, 64):
                if block * 64 + r < num_rows and part * 32 + c < sf_cols:
                    out[block * 64 + r, part * 32 + c] = tile[r, c]

    return gather_factors
