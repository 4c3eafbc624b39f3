"""cp_gather_indexer_k_quant_cache: the keys of some sequences, and their factors, from a paged cache into rows.

    row t of sequence b, cu_seq_lens[b] ≤ t < cu_seq_lens[b + 1], is its key i = t - cu_seq_lens[b]: key i % block_kv of
    block block_table[b, i // block_kv]

Bytes are copied as they are, or FP4 is widened to e4m3 with a factor for the row (lib/widen_steps.py). A thread writes
16 bytes; the first of a row's writes the factor, too. All threads of a block search for the sequence of its first row:
each looks at the end of one of 256 parts of cu_seq_lens. Rows of later sequences go on from there by bisection.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_indexer.lib.paged_cache import SF_BYTES, block_bytes, check_cache
from tk_indexer.lib.rows import FP4_DIMS, FP4_DTYPES, FP4_GROUP

_THREADS = 256
_VECTOR = 16
# Each access is guarded here.
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}
_DATA_DTYPES = torch.float8_e4m3fn, *FP4_DTYPES
_KEY_BYTES = (32, 64, 128)


@kernel(pass_configs=_PASS_CONFIGS)
def _cp_gather_indexer_k_quant_cache_kernel(key_bytes: int, block_kv: int, widens: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_indexer.lib.widen_steps import factor_of_row, widen

    num_rows, num_blocks, num_seqs, num_pages, num_bounds = (
        T.dynamic(name) for name in ("num_rows", "num_blocks", "num_seqs", "num_pages", "num_bounds")
    )
    cache_stride, table_stride = (T.dynamic(name, "int64") for name in ("cache_stride", "table_stride"))
    row_bytes, vector = (2 * key_bytes, _VECTOR // 2) if widens else (key_bytes, _VECTOR)
    lanes = row_bytes // _VECTOR
    rows = _THREADS // lanes

    @T.prim_func
    def gather(
        cache: T.StridedTensor((num_blocks, block_kv * (key_bytes + SF_BYTES)), (cache_stride, 1), "uint8"),
        dst_k: T.Tensor((num_rows, row_bytes), "uint8"),
        dst_scale: T.Tensor((num_rows, SF_BYTES), "uint8"),
        block_table: T.StridedTensor((num_seqs, num_pages), (table_stride, 1), "int32"),
        cu_seq_lens: T.Tensor((num_bounds,), "int32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, rows), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            row, lane = block * rows + thread // lanes, thread % lanes
            words, sf = T.alloc_local((4,), "uint32"), T.alloc_local((1,), "uint32")
            codes = T.alloc_local((2,), "uint32")
            # Of the bounds, `passed` are not above the block's first row, nor may be up to `left` more.
            passed, left, part, whole_parts = (T.alloc_var("int32", init=0) for _ in range(4))
            left = num_bounds
            while left > 0:
                part = T.ceildiv(left, _THREADS)
                last = passed + (thread + 1) * part - 1
                is_passed = T.alloc_var("bool", init=False)
                if last < passed + left:
                    is_passed = cu_seq_lens[last] <= block * rows
                whole_parts = T.syncthreads_count(is_passed)
                passed = passed + whole_parts * part
                left = T.min(left - whole_parts * part, part - 1)
            # cu_seq_lens[seq] ≤ row < cu_seq_lens[end], if both are there.
            seq, end, middle, page_block = (T.alloc_var("int32", init=-1) for _ in range(4))
            seq = passed - 1
            end = passed
            if passed < num_bounds and cu_seq_lens[passed] <= row:
                end = num_bounds
            while end - seq > 1:
                middle = (seq + end) // 2
                if cu_seq_lens[middle] <= row:
                    seq = middle
                else:
                    end = middle
            if row < num_rows and seq >= 0 and seq < num_bounds - 1:
                index = row - cu_seq_lens[seq]
                for i in T.unroll(4):
                    words[i] = T.uint32(0)
                sf[0] = T.uint32(0)
                if index // block_kv < num_pages:
                    page_block = block_table[seq, index // block_kv]
                if page_block >= 0 and page_block < num_blocks:
                    key = index % block_kv
                    if widens or lane == 0:
                        sf[0] = T.ldg32(cache[page_block, block_kv * key_bytes + key * SF_BYTES])
                    if widens:
                        codes[0:2] = T.ldg64(cache[page_block, key * key_bytes + lane * vector])
                        widen(codes, sf, lane * _VECTOR // FP4_GROUP, row_bytes, words)
                        sf[0] = factor_of_row(sf, row_bytes)
                    else:
                        words[0:4] = T.ldg128(cache[page_block, key * key_bytes + lane * vector])
                T.stg128(dst_k[row, lane * _VECTOR], words[0:4])
                if lane == 0:
                    T.stg32(dst_scale[row, 0], sf[0])

    return gather


@op(writes=("dst_k", "dst_scale"), aligned=("kv_cache", "dst_k", "dst_scale"), min_sm=90)
def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Copy the keys of some sequences, and their factors, from a paged cache into rows that lie one after another.

    Row t with cu_seq_lens[b] <= t < cu_seq_lens[b + 1] receives key i = t - cu_seq_lens[b] of sequence b: key
    i % block_kv of block block_table[b, i // block_kv]. Where that block is negative, or not in the table or the cache,
    the row becomes zeros, factor and all, so that its scores are 0. Rows before cu_seq_lens[0], and from cu_seq_lens[B]
    on, stay as they are. Nothing is read back to the host. With TK_DEBUG=1, ends above T and blocks that the cache does
    not have raise. Name and arguments are vLLM's.

    To dst_k with as many bytes a row as the cache, bytes are copied, and the factors' to dst_scale. To float8_e4m3fn
    with twice as many, FP4 is widened, and dst_scale receives a float32 for each row: a power of two of biased exponent
    max(E - 6, 1), E the largest of the row's factors, or NaN if that is 255. Values are unchanged while no group of 32
    channels that is not zero has a factor more than 2 ** 14 below the largest; past that they are rounded.

    Args:
        kv_cache: uint8 (num_blocks, block_kv, W), or (num_blocks, block_kv, 1, W): a block's bytes are first the data
            of its keys, W - 4 bytes each, then their factors. W is 36, 68 or 132, block_kv 32, 64 or 128; blocks may
            lie further apart, by a multiple of 16 bytes.
        dst_k: float8_e4m3fn, int8, uint8 or float4_e2m1fn_x2 (T, W - 4), contiguous: written. To widen FP4,
            float8_e4m3fn (T, 2 * (W - 4)), for W of 36 and 68.
        dst_scale: uint8 (T, 4), float32 (T) or int32 (T), contiguous: written.
        block_table: int32 (B, M), rows may be strided: the blocks of each sequence's pages.
        cu_seq_lens: int32 (B + 1), contiguous, ascending: where each sequence's rows begin, and the last end.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride or a device is out of range.
        UnsupportedArchError: The GPU is older than sm_90.
    """
    num_blocks, block_kv, width = check_cache("kv_cache", kv_cache, "W", None)
    key_bytes, device = width - SF_BYTES, kv_cache.device
    check.one_of("kv_cache (W)", width, tuple(size + SF_BYTES for size in _KEY_BYTES))
    row_bytes = 2 * key_bytes
    is_e4m3 = isinstance(dst_k, Tensor) and dst_k.dtype == torch.float8_e4m3fn
    widens = is_e4m3 and row_bytes in FP4_DIMS and dst_k.ndim == 2 and dst_k.shape[1] == row_bytes
    shape = "T", row_bytes if widens else key_bytes
    num_rows, _ = check.tensor("dst_k", dst_k, _DATA_DTYPES, shape, device=device)
    is_bytes = isinstance(dst_scale, Tensor) and dst_scale.dtype == torch.uint8
    shape = (num_rows, SF_BYTES) if is_bytes else (num_rows,)
    check.tensor("dst_scale", dst_scale, (torch.uint8, torch.float32, torch.int32), shape, device=device)
    num_seqs, _ = check.tensor("block_table", block_table, (torch.int32,), ("B", "M"), layout="rows", device=device)
    check.tensor("cu_seq_lens", cu_seq_lens, (torch.int32,), (num_seqs + 1,), device=device)
    check.below("block_table", block_table, num_blocks, "blocks below {}")
    check.below("cu_seq_lens", cu_seq_lens, num_rows + 1, "ends below {}")
    if launching(dst_k, dst_scale):
        launch = _cp_gather_indexer_k_quant_cache_kernel(key_bytes, block_kv, widens, get_arch(device))
        rows, scales = dst_k.view(torch.uint8), dst_scale.view(torch.uint8).view(num_rows, SF_BYTES)
        launch(block_bytes(kv_cache), rows, scales, block_table, cu_seq_lens)
