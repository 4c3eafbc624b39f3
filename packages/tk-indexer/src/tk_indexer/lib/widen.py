"""The kernel that widens FP4 operands of scores to e4m3: queries, whose factors go into the weights, and dense keys.

A thread has 16 channels of a row, 8 bytes of codes; lib/widen_steps.py has the formula.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_indexer.lib.rows import FP4_GROUP

_THREADS = 256
_CHANNELS = 16
"""Channels of a thread."""


# Each access is guarded here.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _widen_kernel(num_heads: int, dim: int, has_keys: bool, arch: Arch) -> Any:
    """Queries (S · H, D / 2) and keys (N, D / 2); without keys, all that is theirs is None."""
    import tilelang.language as T

    from tk_indexer.lib.widen_steps import factor_of_row, widen

    num_rows, num_columns, num_keys = (T.dynamic(name) for name in ("num_rows", "num_columns", "num_keys"))
    weights_stride = T.dynamic("weights_stride", "int64")
    lanes = dim // _CHANNELS
    rows = _THREADS // lanes

    @T.macro
    def widen_row(x: T.Buffer, sf: T.Buffer, row: T.int32, lane: T.int32, wide: T.Buffer) -> T.PrimExpr:
        codes, of_row, words = (T.alloc_local((size,), "uint32") for size in (2, 1, 4))
        codes[0:2] = T.ldg64(x[row, lane * (_CHANNELS // 2)])
        of_row[0] = T.ldg32(sf[row])
        widen(codes, of_row, lane * _CHANNELS // FP4_GROUP, dim, words)
        T.stg128(wide[row, lane * _CHANNELS], words[0:4])
        return T.reinterpret(factor_of_row(of_row, dim), "float32")

    @T.prim_func
    def widen_operands(
        q: T.Tensor((num_columns, dim // 2), "uint8"),
        q_sf: T.Tensor((num_columns,), "int32"),
        weights: T.StridedTensor((num_rows, num_heads), (weights_stride, 1), "float32"),
        k: T.Tensor((num_keys, dim // 2), "uint8"),
        k_sf: T.Tensor((num_keys,), "int32"),
        wide_q: T.Tensor((num_columns, dim), "float8_e4m3fn"),
        wide_weights: T.Tensor((num_rows, num_heads), "float32"),
        wide_k: T.Tensor((num_keys, dim), "float8_e4m3fn"),
        wide_sf: T.Tensor((num_keys,), "float32"),
    ) -> None:
        num_blocks = T.ceildiv(num_columns, rows)
        with T.Kernel(num_blocks + T.ceildiv(num_keys, rows) if has_keys else num_blocks, threads=_THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % lanes
            factor, row = T.alloc_var("float32"), T.alloc_var("int32")
            row = block * rows + thread // lanes
            if block < num_blocks:
                if row < num_columns:
                    factor = widen_row(q, q_sf, row, lane, wide_q)
                    if lane == 0:
                        query, head = T.truncdiv(row, num_heads), T.truncmod(row, num_heads)
                        wide_weights[query, head] = weights[query, head] * factor
            elif has_keys:
                row -= num_blocks * rows
                if row < num_keys:
                    factor = widen_row(k, k_sf, row, lane, wide_k)
                    if lane == 0:
                        wide_sf[row] = factor

    return widen_operands


def widened(
    q: tuple[Tensor, Tensor], weights: Tensor, kv: tuple[Tensor, Tensor] | None, arch: Arch
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """e4m3 queries (..., H, D), weights times their factors, and e4m3 keys (N, D) with float32 factors (N), if any."""
    data, q_sf = q
    *shape, num_heads, width = data.shape
    wide_q = data.new_empty((*shape, num_heads, 2 * width), dtype=torch.float8_e4m3fn)
    wide_weights = weights.new_empty(weights.shape)
    k = k_sf = wide_k = wide_sf = None
    if kv is not None:
        k, k_sf = kv[0].view(torch.uint8), kv[1]
        wide_k = data.new_empty((len(k), 2 * width), dtype=torch.float8_e4m3fn)
        wide_sf = weights.new_empty((len(k),))
    launch = _widen_kernel(num_heads, 2 * width, kv is not None, arch)
    operands = data.view(torch.uint8).view(-1, width), q_sf.view(-1), weights, k, k_sf
    launch(*operands, wide_q.view(-1, 2 * width), wide_weights, wide_k, wide_sf)
    return wide_q, wide_weights, wide_k, wide_sf
