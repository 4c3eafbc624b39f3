"""Dense scores of a query's keys, which DeepGEMM calls MQA logits: all heads of a query have the same keys.

    out[s, n] = sf[n] · Σ_h weights[s, h] · max(q[s, h] · k[n], 0)    for the keys n in the row's window

q e4m3 (S, H, D), k e4m3 (N, D), sf float32 (N), weights float32 (S, H), out float32 or bfloat16 (S, N). The tensor core
sums over channels; heads are added in float32, in an order that neither the place of a query nor that of a key changes
(lib/fold.py). NaN is kept.

FP4 is widened to e4m3 first, by a kernel of its own (lib/widen.py): a block of queries meets every key, so to widen
keys as they come would take more instructions than the folds leave.

A persistent thread block takes runs: some consecutive keys for a block of queries whose heads are 384 columns.

    load        one warp            finds runs; a run's queries, then 128 keys a step with their factors, by TMA
    write       one warp            finds the same runs; their weights and windows
    multiply    three warpgroups    64 keys × 128 columns at a time, from shared memory: a product is folded to scores
                                    while the tensor core computes the other warpgroups'
    fill        two warps           -∞ outside of the windows

    columns       heads of query 0 │ heads of query 1 │ …    each warpgroup has 128
    keys 0…63     first product of a step
        64…127    second product

Keys are the tensor core's rows: a row's 128 columns are in four lanes, and its scores are neighbours in memory.
docs/tuning/tk-indexer.md has the plan and what was measured.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, op
from tk_indexer.lib.logits import PASS_CONFIGS, ROW_BYTES, arch_of, check_options, check_queries, new_logits
from tk_indexer.lib.rows import FP4_DTYPES
from tk_indexer.lib.widen import widened

_COLUMNS = 384
"""Heads of all queries of a run, 128 for each warpgroup."""
_STEP_KEYS = 128
_NUM_STAGES = 5
_LEAST_RUN = 1024
"""The fewest keys of a run, while there are as many."""
_RUNS_EACH = 8
"""Runs that each thread block should get, as windows differ in length."""
_MOST_TRIED = 64
"""Numbers of runs that are compared: more take the host longer."""


def run_length(num_rows: int, num_keys: int, num_heads: int, num_sms: int) -> int:
    """Keys of a run, a multiple of 128: the busiest thread block has as few steps as possible, if windows are full.

    A run begins with loads of windows and weights, which count as a step.
    """
    num_blocks = ceil_div(num_rows * num_heads, _COLUMNS)
    most = max(num_keys // _LEAST_RUN, 1)
    least = min(most, ceil_div(_RUNS_EACH * num_sms, num_blocks))

    def steps(num_runs: int) -> int:
        return ceil_div(num_blocks * num_runs, num_sms) * (ceil_div(num_keys, num_runs * _STEP_KEYS) + 1)

    return align(ceil_div(num_keys, min(range(least, min(most, least + _MOST_TRIED) + 1), key=steps)), _STEP_KEYS)


@kernel(pass_configs=PASS_CONFIGS)
def dense_logits_kernel(num_heads: int, dim: int, dtype: torch.dtype, arch: Arch) -> Any:
    """Scores of queries (S · H, D) and keys (N, D); S and N are known only at run time."""
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_indexer.lib import dense_steps as steps
    from tk_indexer.lib.fold import COLUMNS, KEYS

    num_rows, num_columns, num_keys, num_cols = (
        T.dynamic(name) for name in ("num_rows", "num_columns", "num_keys", "num_cols")
    )
    weights_stride, sf_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("weights_stride", "sf_stride", "out_stride")
    )
    threads = 128 * steps.WARPGROUPS

    @T.macro
    def multiply(share: steps.Share) -> None:
        T.set_max_nreg(152, 1)
        steps.score(share, T.alloc_fragment((KEYS, COLUMNS), "float32"), arch.has_wgmma)

    @T.prim_func
    def logits(
        q: T.Tensor((num_columns, dim), "float8_e4m3fn"),
        k: T.Tensor((num_keys, dim), "float8_e4m3fn"),
        sf: T.StridedTensor((1, num_keys), (sf_stride, 1), "float32"),
        weights: T.StridedTensor((num_rows, num_heads), (weights_stride, 1), "float32"),
        starts: T.Tensor((num_rows,), "int32"),
        ends: T.Tensor((num_rows,), "int32"),
        out: T.StridedTensor((num_rows, num_cols), (out_stride, 1), dtype),
        run_keys: T.int32,
        max_seqlen: T.int32,
        clean: T.int32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads + 128) as block:
            x = steps.Operands(q, k, sf, weights, starts, ends, out, max_seqlen)
            to_keys, to_queries = steps.keys(_NUM_STAGES, dim), steps.queries(num_heads, dim)
            # Queries are filled by the loading warp and each lane of the writing one, and released by each thread.
            rings = steps.Rings(ring.ring(_NUM_STAGES, 1, 4 * steps.WARPGROUPS), ring.ring(2, 33, threads))
            T.assume(out_stride % (ROW_BYTES // dtype.itemsize) == 0)
            thread = T.get_thread_binding()
            if thread < 128:
                multiply(steps.share(0, num_heads, x, to_keys, to_queries, rings))
            elif thread < 256:
                multiply(steps.share(1, num_heads, x, to_keys, to_queries, rings))
            elif thread < 384:
                multiply(steps.share(2, num_heads, x, to_keys, to_queries, rings))
            else:
                T.set_max_nreg(56, 0)
                if thread < 416:
                    steps.load(steps.start(x, run_keys, num_blocks, block), to_keys, to_queries, rings)
                elif thread < 448:
                    steps.write(steps.start(x, run_keys, num_blocks, block), to_queries, rings)
                elif clean != 0:
                    steps.fill(x, block, num_blocks)

    return logits


@op(min_sm=90)
def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Scores of all queries and keys: out[s, n] = sf[n] * sum over h of weights[s, h] * max(q[s, h] . k[n], 0).

    Row s sees the keys from cu_seq_len_k_start[s] up to, not including, cu_seq_len_k_end[s], both first clamped to
    0 … N; other columns are -inf with clean_logits, and else unspecified. With max_seqlen_k, column j is key
    cu_seq_len_k_start[s] + j, and longer windows are cut.

    A score's bits depend on its query, weights, key and factor alone. NaN in one of these makes exactly its scores NaN.
    Nothing is read back to the host. With TK_DEBUG=1, starts and ends above N raise. Name and arguments are
    DeepGEMM 2.6's.

    Scores of FP4 are those of rows widened as by `cp_gather_indexer_k_quant_cache`, with a query's factors multiplied
    into the weights, rounded to float32.

    Args:
        q: `(data, None)`: float8_e4m3fn (S, H, D), contiguous; H 16, 32 or 64, D 32, 64 or 128. Its scale belongs into
            the weights. Or in FP4 `(data, sf)`: int8, uint8 or float4_e2m1fn_x2 (S, H, D / 2), D 64 or 128, the even
            channel in the low nibble, and int32 (S, H), whose byte b is UE8M0 of the channels 32 b … 32 b + 31; bytes
            past D are ignored.
        kv: `(data, sf)`: float8_e4m3fn (N, D) and float32 (N), contiguous. With FP4 queries in FP4, (N, D / 2) and
            int32 (N).
        weights: float32 (S, H), rows may be strided.
        cu_seq_len_k_start: int32 (S), contiguous.
        cu_seq_len_k_end: int32 (S), contiguous.
        clean_logits: Whether columns outside of the windows become -inf.
        max_seqlen_k: 0 for a column for each key, or the number of columns.
        logits_dtype: float32, or bfloat16: the float32 scores, rounded.
        schedule_meta: Of DeepGEMM; without effect.

    Returns:
        (S, N), or (S, max_seqlen_k), whose rows begin at multiples of 1024 bytes.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    data, q_sf, (num_rows,), num_heads, dim, is_fp4 = check_queries(q, ("S",))
    (k, sf), device = check.pair("kv", kv), data.device
    dtypes, sf_dtype = (FP4_DTYPES, torch.int32) if is_fp4 else ((torch.float8_e4m3fn,), torch.float32)
    num_keys, _ = check.tensor("kv[0]", k, dtypes, ("N", data.shape[-1]), device=device)
    check.tensor("kv[1]", sf, (sf_dtype,), (num_keys,), device=device)
    check.tensor("weights", weights, (torch.float32,), (num_rows, num_heads), layout="rows", device=device)
    windows = cu_seq_len_k_start, cu_seq_len_k_end
    for name, bound in zip(("cu_seq_len_k_start", "cu_seq_len_k_end"), windows):
        check.tensor(name, bound, (torch.int32,), (num_rows,), device=device)
        check.below(name, bound, num_keys + 1, "keys below {}")
    check.in_range("max_seqlen_k", max_seqlen_k, 0, 2**31 - 1)
    check_options(clean_logits, logits_dtype)
    if schedule_meta is not None:
        check.plain("schedule_meta", schedule_meta)
    out = new_logits(data, num_rows, max_seqlen_k or num_keys, logits_dtype)
    if launching(out):
        arch = arch_of("fp8_fp4_mqa_logits", device)
        if num_keys == 0:
            return out.fill_(-torch.inf)
        if is_fp4:
            data, weights, k, sf = widened((data, q_sf), weights, (k, sf), arch)
        num_sms = get_num_sms(device)
        run_keys = run_length(num_rows, num_keys, num_heads, num_sms)
        sf = sf.as_strided((1, num_keys), (align(num_keys, 4), 1))  # TMA takes no other stride, even of one row.
        launch = dense_logits_kernel(num_heads, dim, logits_dtype, arch)
        scalars = run_keys, max_seqlen_k, int(clean_logits), num_sms
        launch(data.view(-1, dim), k, sf, weights, *windows, out, *scalars)
    return out


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`fp8_fp4_mqa_logits` of e4m3 queries, q (S, H, D), with float32 scores. The same errors."""
    windows = cu_seq_len_k_start, cu_seq_len_k_end
    return fp8_fp4_mqa_logits((q, None), kv, weights, *windows, clean_logits, max_seqlen_k)
