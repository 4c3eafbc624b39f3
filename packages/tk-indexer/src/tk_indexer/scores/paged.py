"""Scores of a query's keys in a paged cache, as decoding has them; scores/dense.py has the formula, lib/fold.py its
order of sums, so that both give the same bits.

q e4m3 (B, next_n, H, D): next_n queries, of H heads each, of every sequence. The keys of sequence b are in the blocks
that block_table[b] lists; query i of it sees the first context_lens[b, i].

A persistent thread block takes chunks of 64 keys of one sequence after the other, as many as any other block, in the
order of a schedule that a kernel of its own makes on the device (get_paged_mqa_logits_metadata).

    load        one warp             finds the sequences; the queries, then chunk after chunk with its factors, by TMA
    write       one warp             finds the same; their weights and lengths
    multiply    three warpgroups     every third chunk: 64 keys × up to 128 columns, from shared memory; a product is
                                     folded to scores while the tensor core computes another warpgroup's
    fill        two warps            -∞ behind the lengths

    columns     heads of query 0 │ heads of query 1 │ …     more than 128 are products of the same keys, one by one

Each key is read once, and its data stay in shared memory: next_n queries cost the memory little more than one. FP4 keys
are widened to e4m3 there by the warpgroup that multiplies them, queries by a kernel before (lib/widen.py).
docs/tuning/tk-indexer.md has the plan and what was measured.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_indexer.lib.logits import PASS_CONFIGS, ROW_BYTES, arch_of, check_options, check_queries, new_logits
from tk_indexer.lib.paged_cache import BLOCK_SIZES, SF_BYTES, block_bytes, bytes_of_key, check_cache
from tk_indexer.lib.widen import widened

MAX_NEXT_N = 8
_MAX_SMS = 1 << 16
_SCHEDULE_THREADS = 256
_CHUNK = 64
"""Keys of a chunk, a tensor core's rows."""
_WARPGROUPS = 3
"""Warpgroups that multiply: chunk c of a thread block is that of warpgroup c % 3."""
_NUM_WIDE = 2 * _WARPGROUPS
"""Chunks of FP4 that are widened: two of each warpgroup, as the tensor core may still read one."""
_MAX_STAGES = 24
_OTHER_SHARED = 2048
"""Bytes of shared memory for barriers, runs and lengths, and for what is aligned."""


def num_stages(num_columns: int, dim: int, is_fp4: bool, arch: Arch) -> int:
    """Chunks of keys in flight: as many as fit beside two stages of queries, up to some 200 KB of keys.

    A stage is always the same warpgroup's, or one might take what another has not received yet for its own chunk: loads
    end in any order, and a barrier tells only odd rounds from even ones. And of FP4, always the same place widened.
    """
    room = arch.shared_memory_each(1) - _OTHER_SHARED - 2 * num_columns * (dim + SF_BYTES)
    if is_fp4:
        room -= _NUM_WIDE * _CHUNK * dim
    fitting = min(room // (_CHUNK * (bytes_of_key(dim, is_fp4) + SF_BYTES)), _MAX_STAGES)
    return fitting - fitting % (_NUM_WIDE if is_fp4 else _WARPGROUPS)


@kernel(pass_configs=PASS_CONFIGS)
def _schedule_kernel(next_n: int, arch: Arch) -> Any:
    """Where each thread block begins: an equal number of chunks each."""
    import tilelang.language as T

    from tk_indexer.lib.schedule_steps import write_schedule

    num_seqs, num_bounds = T.dynamic("num_seqs"), T.dynamic("num_bounds")

    @T.prim_func
    def schedule(context_lens: T.Tensor((num_seqs, next_n), "int32"), out: T.Tensor((num_bounds, 2), "int32")) -> None:
        with T.Kernel(1, threads=_SCHEDULE_THREADS):
            write_schedule(context_lens, out)

    return schedule


@op(aligned=(), min_sm=90)
def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """A schedule of `fp8_fp4_paged_mqa_logits`: where each of its thread blocks begins and the one before it ends.

    It is made on the device. Scores do not depend on it; one of other lengths makes thread blocks uneven. Name and
    arguments are DeepGEMM's.

    Args:
        context_lens: int32 (B, next_n), contiguous: the number of keys that each query of a sequence sees.
        block_kv: Keys of a block of the cache: 32, 64 or 128. Without effect.
        num_sms: Thread blocks that the scores take, 1 to 65536; `tk_core.get_num_sms()` fills the GPU.
        indices: int32, each row's sequence; without effect.

    Returns:
        int32 (num_sms + 1, 2): a sequence, and a chunk of 64 of its keys.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range.
        UnsupportedArchError: The GPU is older than sm_90.
    """
    _, next_n = check.tensor("context_lens", context_lens, (torch.int32,), ("B", "next_n"))
    check.in_range("context_lens (next_n)", next_n, 1, MAX_NEXT_N)
    check.integer("block_kv", block_kv)
    check.one_of("block_kv", block_kv, BLOCK_SIZES)
    check.in_range("num_sms", num_sms, 1, _MAX_SMS)
    _check_indices(indices, context_lens.device)
    out = new(context_lens.new_empty, (num_sms + 1, 2))
    if launching(out):
        _schedule_kernel(next_n, get_arch(context_lens.device))(context_lens, out)
    return out


@kernel(pass_configs=PASS_CONFIGS)
def paged_logits_kernel(
    num_heads: int, dim: int, is_fp4: bool, next_n: int, block_kv: int, dtype: torch.dtype, arch: Arch
) -> Any:
    """Scores of queries (B · next_n · H, D) and keys in blocks; B and what depends on it are known only at run time."""
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_indexer.lib import paged_steps as steps
    from tk_indexer.lib.fold import KEYS
    from tk_indexer.lib.widen_steps import write_tables

    names = "num_seqs", "num_rows", "num_columns", "num_blocks", "num_pages", "num_bounds", "num_cols"
    num_seqs, num_rows, num_columns, num_blocks, num_pages, num_bounds, num_cols = map(T.dynamic, names)
    cache_stride, weights_stride, table_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("cache_stride", "weights_stride", "table_stride", "out_stride")
    )
    key_bytes = bytes_of_key(dim, is_fp4)
    num_bytes = block_kv * (key_bytes + SF_BYTES)
    codes, sf_dtype = ("uint32", "uint32") if is_fp4 else ("float8_e4m3fn", "float32")
    size = T.dtype(codes).bits // 8
    atoms = steps.atoms(num_heads, next_n)
    stages = num_stages(atoms.num * atoms.columns, dim, is_fp4, arch)
    threads = 128 * _WARPGROUPS

    @T.macro
    def multiply(share: steps.Share) -> None:
        T.set_max_nreg(152, 1)
        products = T.alloc_fragment((KEYS, atoms.columns), "float32")
        steps.score(share, products, arch.has_wgmma)

    @T.prim_func
    def logits(
        q: T.Tensor((num_columns, dim), "float8_e4m3fn"),
        cache: T.StridedTensor((num_blocks, num_bytes), (cache_stride, 1), "uint8"),
        weights: T.StridedTensor((num_rows, num_heads), (weights_stride, 1), "float32"),
        lengths: T.Tensor((num_seqs, next_n), "int32"),
        block_table: T.StridedTensor((num_seqs, num_pages), (table_stride, 1), "int32"),
        schedule: T.Tensor((num_bounds, 2), "int32"),
        out: T.StridedTensor((num_rows, num_cols), (out_stride, 1), dtype),
        most_keys: T.int32,
        clean: T.int32,
    ) -> None:
        with T.Kernel(num_bounds - 1, threads=threads + 128) as block:
            # A block's factors, at its end, are as long as a number of keys.
            k_shape = num_blocks, num_bytes // key_bytes, key_bytes // size
            k = T.view(cache, k_shape, codes, (cache_stride // size, key_bytes // size, 1))
            sf = T.view(cache, (num_blocks, num_bytes // SF_BYTES), sf_dtype, (cache_stride // SF_BYTES, 1))
            x = steps.Operands(q, k, sf, weights, lengths, block_table, schedule, out, most_keys)
            to_keys = steps.keys(stages, dim, block_kv, _NUM_WIDE if is_fp4 else 0)
            to_queries = steps.queries(atoms, dim)
            # Queries are filled by the loading warp and each lane of the writing one, and released by each thread.
            rings = steps.Rings(ring.ring(stages, 1, 4), ring.ring(2, 33, threads))
            T.assume(out_stride % (ROW_BYTES // dtype.itemsize) == 0)
            thread = T.get_thread_binding()
            if is_fp4:
                write_tables(to_keys.tables)
                T.sync_threads()
            if thread < 128:
                multiply(steps.share(0, _WARPGROUPS, atoms, x, to_keys, to_queries, rings))
            elif thread < 256:
                multiply(steps.share(1, _WARPGROUPS, atoms, x, to_keys, to_queries, rings))
            elif thread < 384:
                multiply(steps.share(2, _WARPGROUPS, atoms, x, to_keys, to_queries, rings))
            else:
                T.set_max_nreg(56, 0)
                if thread < 416:
                    steps.load(steps.start(x, block), atoms, block_kv, to_keys, to_queries, rings)
                elif thread < 448:
                    steps.write(steps.start(x, block), atoms, to_queries, rings)
                elif clean != 0:
                    steps.fill(x, block)

    return logits


@op(aligned=("q", "kv_cache"), min_sm=90)
def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of each sequence's queries and its paged keys: sf * sum over h of weights[h] * max(q[h] . k, 0).

    Row b * next_n + i is query i of sequence b. Its column j is key j % block_kv of block
    block_table[b, j // block_kv], for j below context_lens[b, i], which is first clamped to
    0 ... min(max_context_len, M * block_kv). Where that block is negative, or not in the cache, the score is -inf.
    Columns behind the length are -inf with clean_logits, and else
    unspecified.

    A score's bits depend on its query, weights, key and factor alone: they are those of `fp8_fp4_mqa_logits`, for any
    schedule. NaN in one of these makes exactly its scores NaN. Nothing is read back to the host. With TK_DEBUG=1,
    lengths that are too large and blocks that the cache does not have raise. Name and arguments are DeepGEMM 2.6's.

    Args:
        q: `(data, None)`: float8_e4m3fn (B, next_n, H, D), contiguous; next_n 1 to 8, H 16, 32 or 64, D 32, 64 or 128.
            Its scale belongs into the weights. Or in FP4 `(data, sf)`, as in `fp8_fp4_mqa_logits`: (B, next_n, H,
            D / 2), D 64 or 128, and int32 (B, next_n, H).
        kv_cache: uint8 (num_blocks, block_kv, W), or (num_blocks, block_kv, 1, W): a block's bytes are first the data
            of its keys, then their factors, in FP4 if the queries are. W is D + 4, or in FP4 D / 2 + 4; block_kv is 32,
            64 or 128; blocks may lie further apart, by a multiple of 16 bytes.
        weights: float32 (B * next_n, H), rows may be strided.
        context_lens: int32 (B, next_n), contiguous, in any order.
        block_table: int32 (B, M), rows may be strided: the blocks of each sequence's pages.
        schedule_meta: int32 (n + 1, 2), contiguous, of `get_paged_mqa_logits_metadata` for n thread blocks.
        max_context_len: The number of columns.
        clean_logits: Whether columns behind the lengths become -inf.
        logits_dtype: float32, or bfloat16: the float32 scores, rounded.
        indices: int32, each row's sequence; without effect.

    Returns:
        (B * next_n, max_context_len), whose rows begin at multiples of 1024 bytes.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    data, q_sf, (num_seqs, next_n), num_heads, dim, is_fp4 = check_queries(q, ("B", "next_n"))
    device = data.device
    check.in_range("q[0] (next_n)", next_n, 1, MAX_NEXT_N)
    num_blocks, block_kv, _ = check_cache("kv_cache", kv_cache, bytes_of_key(dim, is_fp4) + SF_BYTES, device)
    weights_shape = num_seqs * next_n, num_heads
    check.tensor("weights", weights, (torch.float32,), weights_shape, layout="rows", device=device)
    check.tensor("context_lens", context_lens, (torch.int32,), (num_seqs, next_n), device=device)
    table_shape = num_seqs, "M"
    _, num_pages = check.tensor("block_table", block_table, (torch.int32,), table_shape, layout="rows", device=device)
    num_bounds, _ = check.tensor("schedule_meta", schedule_meta, (torch.int32,), ("n + 1", 2), device=device)
    check.require(num_bounds > 1, "schedule_meta", "at least 2 rows", num_bounds)
    check.in_range("max_context_len", max_context_len, 0, 2**31 - 1)
    check_options(clean_logits, logits_dtype)
    _check_indices(indices, device)
    most_keys = min(max_context_len, num_pages * block_kv)
    check.below("context_lens", context_lens, most_keys + 1, "lengths below {}")
    check.below("block_table", block_table, num_blocks, "blocks below {}")
    out = new_logits(data, num_seqs * next_n, max_context_len, logits_dtype)
    if launching(out):
        arch = arch_of("fp8_fp4_paged_mqa_logits", device)
        if most_keys == 0 or num_blocks == 0:
            return out.fill_(-torch.inf)
        if is_fp4:
            data, weights, _, _ = widened((data, q_sf), weights, None, arch)
        launch = paged_logits_kernel(num_heads, dim, is_fp4, next_n, block_kv, logits_dtype, arch)
        tensors = data.view(-1, dim), block_bytes(kv_cache), weights, context_lens, block_table, schedule_meta, out
        launch(*tensors, most_keys, int(clean_logits))
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits` of e4m3 queries, q (B, next_n, H, D), with float32 scores. The same errors."""
    operands = kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    return fp8_fp4_paged_mqa_logits((q, None), *operands, indices=indices)


def _check_indices(indices: Tensor | None, device: torch.device) -> None:
    if indices is not None:
        check.tensor("indices", indices, (torch.int32,), ("rows",), device=device)
