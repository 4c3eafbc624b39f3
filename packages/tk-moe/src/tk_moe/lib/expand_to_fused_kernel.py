"""The kernel of expand_to_fused and expand_to_fused_with_sf; expand_to_fused.py describes the tiling."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div


@dataclass(frozen=True)
class ExpandConfig:
    """How one thread block copies a row."""

    threads: int
    vectors_per_thread: int
    """Vectors of a row that a thread holds in registers at a time."""

    max_padding_rows = 8
    """Rows that one thread block checks for padding; at most 32, one per lane of a warp."""
    max_gathered_rows = 2048
    """Most rows whose scale factors one thread block gathers; each takes 4 bytes of shared memory."""
    gathered_columns = 16
    """Columns of scale factors that a thread holds in registers at a time."""
    pairs_in_flight = 32
    """Loads of positions that a thread of a gathering block has in flight."""

    @staticmethod
    @cache
    def best(num_vectors: int, has_sf: bool, arch: Arch) -> "ExpandConfig":
        """The configuration for rows of `num_vectors` vectors: 4 per thread at a time, up to 256 threads.

        Rows with scale factors are short and get as many threads as they have vectors, because a gathering block has to
        search all positions.
        """
        chunk = ceil_div(num_vectors, ceil_div(num_vectors, 256 * 4))
        vectors_per_thread = ceil_div(chunk, 256) if has_sf else min(4, ceil_div(chunk, 32))
        return ExpandConfig(align(ceil_div(chunk, vectors_per_thread), 32), vectors_per_thread)

    @staticmethod
    def num_blocks(num_tokens: int, num_expanded_tokens: int) -> int:
        """One thread block per token; more where there is much padding, so that up to a few thousand share it."""
        enough = ceil_div(num_expanded_tokens, ExpandConfig.max_padding_rows)
        return max(num_tokens, min(ceil_div(num_expanded_tokens, 2), 2048), enough)

    @staticmethod
    def gathers(sf_cols: int, is_col_major: bool) -> bool:
        """Whether separate thread blocks gather the scale factors. For few columns, searching for tokens costs more."""
        return is_col_major and sf_cols > 8


# Every access has a guard of its own, and the barriers are written out.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True})
def expand_kernel(
    cols: int,
    num_topk: int,
    dtype: torch.dtype,
    vector_bytes: int,
    sf_cols: int,
    sf_dtype: torch.dtype | None,
    gathers: bool,
    is_aligned: bool,
    config: ExpandConfig,
    arch: Arch,
) -> Any:
    """Copy rows of `cols` elements in vectors of `vector_bytes`, and their `sf_cols` scale factors of 4 bytes.

    `gathers`: separate thread blocks write the scale factors; `is_aligned`: scale factors and positions are aligned to
    16 bytes.
    """
    import tilelang.language as T

    word = {1: "uint8", 2: "uint16"}.get(vector_bytes, "uint32")
    word_bytes = min(vector_bytes, 4)
    lanes = vector_bytes // word_bytes
    row_words = cols * dtype.itemsize // word_bytes
    num_vectors = row_words // lanes
    threads, vectors_per_thread = config.threads, config.vectors_per_thread
    num_chunks = ceil_div(num_vectors, threads * vectors_per_thread)
    sf_per_thread = ceil_div(sf_cols, threads)
    sf_chunks = ceil_div(sf_cols, config.gathered_columns)
    # Elements of one load.
    sf_vector = 4 if is_aligned and sf_cols % 4 == 0 else 1
    pair_vector = 4 if is_aligned and num_topk % 4 == 0 else 1
    loads = config.pairs_in_flight // pair_vector

    num_tokens = T.dynamic("num_tokens")
    num_expanded_tokens = T.dynamic("num_expanded_tokens")
    out_sf_row_stride, out_sf_col_stride = T.dynamic("out_sf_row_stride"), T.dynamic("out_sf_col_stride")

    @T.macro
    def load_maps(
        block: T.int32,
        num_blocks: T.int32,
        tx: T.int32,
        token_topk_to_pos: T.Buffer,
        pos_to_expert: T.Buffer,
        pos: T.Buffer,
        expert: T.Buffer,
    ) -> None:
        # Each lane checks row block + lane * num_blocks; every warp checks all of them for itself.
        expert[0] = 0
        if tx % 32 < config.max_padding_rows and block + (tx % 32) * num_blocks < num_expanded_tokens:
            expert[0] = pos_to_expert[block + (tx % 32) * num_blocks]
        for k in T.unroll(num_topk):
            pos[k] = -1
            if block < num_tokens:
                pos[k] = token_topk_to_pos[block, k]

    @T.macro
    def copy_row(block: T.int32, tx: T.int32, pos: T.Buffer, x_words: T.Buffer, out_words: T.Buffer) -> None:
        row = T.alloc_local((vectors_per_thread, lanes), word)
        if block < num_tokens:
            for chunk in T.serial(num_chunks):
                for j in T.unroll(vectors_per_thread):
                    if (chunk * vectors_per_thread + j) * threads + tx < num_vectors:
                        for v in T.vectorized(lanes):
                            row[j, v] = x_words[block, ((chunk * vectors_per_thread + j) * threads + tx) * lanes + v]
                for k in T.unroll(num_topk):
                    if pos[k] >= 0 and pos[k] < num_expanded_tokens:
                        for j in T.unroll(vectors_per_thread):
                            if (chunk * vectors_per_thread + j) * threads + tx < num_vectors:
                                for v in T.vectorized(lanes):
                                    out_words[pos[k], ((chunk * vectors_per_thread + j) * threads + tx) * lanes + v] = (
                                        row[j, v]
                                    )

    @T.macro
    def zero_row(row: T.int32, tx: T.int32, out_words: T.Buffer) -> None:
        for chunk in T.serial(num_chunks):
            for j in T.unroll(vectors_per_thread):
                if (chunk * vectors_per_thread + j) * threads + tx < num_vectors:
                    for v in T.vectorized(lanes):
                        out_words[row, ((chunk * vectors_per_thread + j) * threads + tx) * lanes + v] = T.cast(0, word)

    @T.macro
    def gather_factors(
        first_row: T.int32,
        num_rows: T.int32,
        tx: T.int32,
        token_of_row: T.Buffer,
        sf: T.Buffer,
        pairs: T.Buffer,
        out_sf: T.Buffer,
    ) -> None:
        found = T.alloc_local((loads, pair_vector), "int32")
        factors = T.alloc_local((config.gathered_columns,), sf_dtype)
        for i in T.serial(ceil_div(config.max_gathered_rows, threads)):
            if i * threads + tx < num_rows:
                token_of_row[i * threads + tx] = -1
        T.sync_threads()
        for i in T.serial(T.ceildiv(num_tokens * num_topk, threads * config.pairs_in_flight)):
            for j in T.unroll(loads):
                pair = ((i * loads + j) * threads + tx) * pair_vector
                for v in T.vectorized(pair_vector):
                    found[j, v] = -1
                if pair < num_tokens * num_topk:
                    for v in T.vectorized(pair_vector):
                        found[j, v] = pairs[pair + v]
            for j in T.unroll(loads):
                pair = ((i * loads + j) * threads + tx) * pair_vector
                for v in T.unroll(pair_vector):
                    if found[j, v] >= first_row and found[j, v] < first_row + num_rows:
                        token_of_row[found[j, v] - first_row] = pair // num_topk
        T.sync_threads()
        # Each warp writes some columns of 32 rows.
        for i in T.serial(T.ceildiv(T.ceildiv(num_rows, 32) * sf_chunks, threads // 32)):
            item = i * (threads // 32) + tx // 32
            row = item // sf_chunks * 32 + tx % 32
            column = item % sf_chunks * config.gathered_columns
            if row < num_rows:
                token = token_of_row[row]
                for j in T.unroll(config.gathered_columns // sf_vector):
                    if column + j * sf_vector < sf_cols:
                        for v in T.vectorized(sf_vector):
                            factors[j * sf_vector + v] = T.cast(0, sf_dtype)
                        if token >= 0:
                            for v in T.vectorized(sf_vector):
                                factors[j * sf_vector + v] = sf[token, column + j * sf_vector + v]
                for j in T.unroll(config.gathered_columns):
                    if column + j < sf_cols:
                        out_sf[first_row + row, column + j] = factors[j]

    @T.prim_func
    def expand_to_fused(
        x: T.Tensor((num_tokens, cols), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            tx = T.get_thread_binding()
            x_words = T.view(x, (num_tokens, row_words), word)
            out_words = T.view(out, (num_expanded_tokens, row_words), word)
            pos = T.alloc_local((num_topk,), "int32")
            expert = T.alloc_local((1,), "int32")
            load_maps(block, num_blocks, tx, token_topk_to_pos, pos_to_expert, pos, expert)
            copy_row(block, tx, pos, x_words, out_words)
            padding = T.alloc_var("uint32")
            padding = T.cast(T.ballot(expert[0] < 0), "uint32")
            for i in T.serial(config.max_padding_rows):
                if (padding >> T.cast(i, "uint32")) & T.uint32(1) != T.uint32(0):
                    zero_row(block + i * num_blocks, tx, out_words)

    if sf_dtype is None:
        return expand_to_fused

    @T.prim_func
    def expand_to_fused_with_sf(
        x: T.Tensor((num_tokens, cols), dtype),
        sf: T.Tensor((num_tokens, sf_cols), sf_dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        out_sf: T.StridedTensor((num_expanded_tokens, sf_cols), (out_sf_row_stride, out_sf_col_stride), sf_dtype),
        num_blocks: T.int32,
        num_gathering_blocks: T.int32,
        rows_per_gathering_block: T.int32,
    ) -> None:
        with T.Kernel(num_gathering_blocks + num_blocks, threads=threads) as index:
            tx = T.get_thread_binding()
            block = index - num_gathering_blocks
            if gathers and block < 0:
                token_of_row = T.alloc_shared((config.max_gathered_rows,), "int32")
                gather_factors(
                    index * rows_per_gathering_block,
                    T.min(rows_per_gathering_block, num_expanded_tokens - index * rows_per_gathering_block),
                    tx,
                    token_of_row,
                    sf,
                    T.view(token_topk_to_pos, (num_tokens * num_topk,), "int32"),
                    out_sf,
                )
            else:
                x_words = T.view(x, (num_tokens, row_words), word)
                out_words = T.view(out, (num_expanded_tokens, row_words), word)
                pos = T.alloc_local((num_topk,), "int32")
                expert = T.alloc_local((1,), "int32")
                factors = T.alloc_local((sf_per_thread,), sf_dtype)
                load_maps(block, num_blocks, tx, token_topk_to_pos, pos_to_expert, pos, expert)
                if not gathers:
                    for j in T.unroll(sf_per_thread):
                        if block < num_tokens and j * threads + tx < sf_cols:
                            factors[j] = sf[block, j * threads + tx]
                copy_row(block, tx, pos, x_words, out_words)
                if not gathers:
                    for k in T.unroll(num_topk):
                        if pos[k] >= 0 and pos[k] < num_expanded_tokens:
                            for j in T.unroll(sf_per_thread):
                                if j * threads + tx < sf_cols:
                                    out_sf[pos[k], j * threads + tx] = factors[j]
                padding = T.alloc_var("uint32")
                padding = T.cast(T.ballot(expert[0] < 0), "uint32")
                for i in T.serial(config.max_padding_rows):
                    if (padding >> T.cast(i, "uint32")) & T.uint32(1) != T.uint32(0):
                        zero_row(block + i * num_blocks, tx, out_words)
                        if not gathers:
                            for j in T.unroll(sf_per_thread):
                                if j * threads + tx < sf_cols:
                                    out_sf[block + i * num_blocks, j * threads + tx] = T.cast(0, sf_dtype)

    return expand_to_fused_with_sf
