"""cp_gather_indexer_k_quant_cache: the keys of some sequences, and their factors, from a paged cache into rows.

    row t of sequence b, cu_seq_lens[b] ≤ t < cu_seq_lens[b + 1], is its key i = t - cu_seq_lens[b]: key i % block_kv of
    block block_table[b, i // block_kv]

Bytes are copied as they are. A thread copies 16 bytes, so W / 16 lanes take a row's data, of which the first copies the
factor, too. Each finds the row's sequence by bisection of cu_seq_lens, which is in L1 after the first row.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_indexer.lib.paged_cache import SF_BYTES, block_bytes, check_cache

_THREADS = 256
_VECTOR = 16
# Each access is guarded here.
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}
_DATA_DTYPES = torch.float8_e4m3fn, torch.uint8, torch.int8
_KEY_BYTES = (32, 64, 128)


@kernel(pass_configs=_PASS_CONFIGS)
def _cp_gather_indexer_k_quant_cache_kernel(
    key_bytes: int, block_kv: int, dtype: torch.dtype, scale_dtype: torch.dtype, arch: Arch
) -> Any:
    import tilelang.language as T

    num_rows, num_blocks, num_seqs, num_pages, num_bounds = (
        T.dynamic(name) for name in ("num_rows", "num_blocks", "num_seqs", "num_pages", "num_bounds")
    )
    cache_stride, table_stride = (T.dynamic(name, "int64") for name in ("cache_stride", "table_stride"))
    lanes = key_bytes // _VECTOR
    rows = _THREADS // lanes

    @T.prim_func
    def gather(
        cache: T.StridedTensor((num_blocks, block_kv * (key_bytes + SF_BYTES)), (cache_stride, 1), "uint8"),
        dst_k: T.Tensor((num_rows, key_bytes), T.dtype(dtype)),
        dst_scale: T.Tensor((num_rows, SF_BYTES // scale_dtype.itemsize), T.dtype(scale_dtype)),
        block_table: T.StridedTensor((num_seqs, num_pages), (table_stride, 1), "int32"),
        cu_seq_lens: T.Tensor((num_bounds,), "int32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, rows), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            row, lane = block * rows + thread // lanes, thread % lanes
            words, sf = T.alloc_local((4,), "uint32"), T.alloc_local((1,), "uint32")
            # cu_seq_lens[seq] ≤ row < cu_seq_lens[end], if both are there.
            seq, end, middle, page_block = (T.alloc_var("int32", init=-1) for _ in range(4))
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
                    words[0:4] = T.ldg128(cache[page_block, key * key_bytes + lane * _VECTOR])
                    if lane == 0:
                        sf[0] = T.ldg32(cache[page_block, block_kv * key_bytes + key * SF_BYTES])
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

    Args:
        kv_cache: uint8 (num_blocks, block_kv, W), or (num_blocks, block_kv, 1, W): a block's bytes are first the data
            of its keys, W - 4 bytes each, then their factors. W is 36, 68 or 132, block_kv 32, 64 or 128; blocks may
            lie further apart, by a multiple of 16 bytes.
        dst_k: float8_e4m3fn, uint8 or int8 (T, W - 4), contiguous: written.
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
    num_rows, _ = check.tensor("dst_k", dst_k, _DATA_DTYPES, ("T", key_bytes), device=device)
    is_bytes = isinstance(dst_scale, Tensor) and dst_scale.dtype == torch.uint8
    shape = (num_rows, SF_BYTES) if is_bytes else (num_rows,)
    check.tensor("dst_scale", dst_scale, (torch.uint8, torch.float32, torch.int32), shape, device=device)
    num_seqs, _ = check.tensor("block_table", block_table, (torch.int32,), ("B", "M"), layout="rows", device=device)
    check.tensor("cu_seq_lens", cu_seq_lens, (torch.int32,), (num_seqs + 1,), device=device)
    check.below("block_table", block_table, num_blocks, "blocks below {}")
    check.below("cu_seq_lens", cu_seq_lens, num_rows + 1, "ends below {}")
    if launching(dst_k, dst_scale):
        key = key_bytes, block_kv, dst_k.dtype, dst_scale.dtype
        launch = _cp_gather_indexer_k_quant_cache_kernel(*key, get_arch(device))
        scales = dst_scale.view(num_rows, SF_BYTES // dst_scale.element_size())
        launch(block_bytes(kv_cache), dst_k, scales, block_table, cu_seq_lens)
