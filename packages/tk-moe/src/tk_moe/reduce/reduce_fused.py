"""reduce_fused: each token's weighted sum of the rows that its experts gave, gathered from their segments.

    acc = 0;  acc = fma(x[pos], weight * row_sf[pos], acc)  for k = 0, 1, ... with pos = token_topk_to_pos[t, k] >= 0
    out[t] = round(acc)                                     or, in e4m3, round(float32(acc * sf))

x (num_expanded_tokens, hidden) bf16 or float32, row_sf float32 (num_expanded_tokens) or none, weights float32
(num_tokens, num_topk) or none, sf float32 (1) or none, out (num_tokens, hidden) in x's dtype or e4m3. All in
float32, each operation rounded to nearest even, so every bit is defined.

expand_to_fused_bwd, each token's sum of the gradients of its copies, is the same without weights, bit for bit:
fma(x, 1, acc) is x + acc, rounded once.

A thread block computes part of one token's channels; each thread owns one 16-byte vector of them in every row. A thread
loads its vectors of all num_topk rows before it uses the first, so that many loads are in flight. Thread blocks are
small, so that an SM holds many, and some load while others start or wait.

    x     row pos[0]    [ thread 0 | thread 1 | … ]      each field 8 channels of bfloat16, 4 of float32
          row pos[1]    [ thread 0 | thread 1 | … ]
          …
    out   row t         [ thread 0 | thread 1 | … ]
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import given_or_new, launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_moe.lib.check_maps import check_positions

_INPUT_DTYPES = (torch.bfloat16, torch.float32)
_VECTOR_BYTES = 16


class Factors(NamedTuple):
    """Which factors a call passes."""

    row_sf: bool
    weights: bool
    out_sf: bool


@kernel(pass_configs=DIRECT_COPIES)
def _reduce_fused_kernel(
    hidden: int, num_topk: int, dtype: torch.dtype, out_dtype: torch.dtype, has: Factors, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_moe.lib.expanded_rows import load_positions, vectors_of_threads

    vector, zero = _VECTOR_BYTES // dtype.itemsize, T.cast(0, dtype)
    num_vectors = hidden // vector
    # Up to 128 threads, one vector each, as few of them idle as possible. On an H200, 4096 tokens of 8 rows in bfloat16
    # take 125.3 µs at hidden 7168 and 41.5 µs at hidden 2048 with 128 threads of 64 registers, instead of 138.2 and
    # 48.6 µs with 224 threads of 88.
    threads = min((128, 96, 64, 32), key=lambda threads: align(num_vectors, threads))
    block_channels, num_chunks = threads * vector, ceil_div(num_vectors, threads)
    # As many as the registers for the rows in flight allow.
    few = 768 if has.out_sf else 1024
    threads_per_sm = few if num_topk <= 8 else 512 if num_topk <= 16 else 256
    num_tokens, num_expanded_tokens = T.dynamic("num_tokens"), T.dynamic("num_expanded_tokens")

    @T.prim_func
    def reduce_fused(
        x: T.Tensor((num_expanded_tokens, hidden), dtype),
        row_sf: T.Tensor((num_expanded_tokens,), "float32"),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out_sf: T.Tensor((1,), "float32"),
        out: T.Tensor((num_tokens, hidden), out_dtype),
    ) -> None:
        with T.Kernel(num_tokens * num_chunks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(threads_per_sm // threads)
            token, channel = block // num_chunks, block % num_chunks * block_channels
            # -1 where a slot has no row.
            pos = T.alloc_local((num_topk,), "int32")
            scale = T.alloc_local((num_topk,), "float32")
            rows = T.alloc_fragment((num_topk, block_channels), dtype)
            acc = T.alloc_fragment((block_channels,), "float32")
            T.annotate_layout({x: vectors_of_threads(x.shape, vector, threads) for x in (rows, acc)})
            load_positions(token_topk_to_pos, token, num_expanded_tokens, pos)
            for k in T.unroll(num_topk):
                scale[k] = topk_weights[token, k] if has.weights else T.float32(1)
            for k in T.unroll(num_topk):
                if has.row_sf and pos[k] >= 0:
                    scale[k] = scale[k] * row_sf[pos[k]]
            T.clear(acc)
            for k in T.unroll(num_topk):
                for c in T.Parallel(block_channels):
                    is_read = pos[k] >= 0 and channel + c < hidden
                    rows[k, c] = T.if_then_else(is_read, x[pos[k], channel + c], zero)
            for k in T.unroll(num_topk):
                if pos[k] >= 0:
                    for c in T.Parallel(block_channels):
                        acc[c] = T.ieee_fmaf(T.cast(rows[k, c], "float32"), scale[k], acc[c])
            if has.out_sf:
                for c in T.Parallel(block_channels):
                    acc[c] = acc[c] * out_sf[0]
            T.copy(acc, out[token, channel : channel + block_channels])

    return reduce_fused


@op(writes=("out",))
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows from the experts' segments, weighted: the inverse of `expand_to_fused`.

    In float32, for k = 0, 1, ... with pos = token_topk_to_pos[t, k] >= 0:
    acc = fma(x[pos], topk_weights[t, k] * row_sf[pos], acc), starting from 0; a missing factor is 1. A token without
    any position gets zeros.

    Args:
        x: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0; or a pair of it and
            row_sf, a float32 factor for each row (num_expanded_tokens,).
        topk_weights: float32 (num_tokens, num_topk), or None for all ones.
        token_topk_to_pos: int32 (num_tokens, num_topk); negative means none, and a position past the last row is
            ignored (`TK_DEBUG=1` raises ValueError).
        fp8_format: "" to return x's dtype, "e4m3" for float8_e4m3fn (rounded to nearest even, saturating at 448).
        sf: float32 (1,), with "e4m3" only: the sum is multiplied by it before rounding.
        out: (num_tokens, hidden) of the output's dtype, contiguous, to write into; it must overlap no other argument.

    Returns:
        (num_tokens, hidden): `out`, or a new tensor.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride, device or format.
    """
    row_sf = None
    if not isinstance(x, Tensor):
        is_pair = isinstance(x, tuple | list) and len(x) == 2
        check.require_type(is_pair, "x", "a torch.Tensor or a pair (x, row_sf)", type(x))
        x, row_sf = x
    num_expanded_tokens, hidden = check.tensor("x", x, _INPUT_DTYPES, ("num_expanded_tokens", "hidden"))
    check.multiple_of("hidden (columns of x)", hidden, 64)
    device = x.device
    num_tokens, num_topk = check_positions(token_topk_to_pos, "num_tokens", num_expanded_tokens, device)
    if row_sf is not None:
        check.tensor("x[1]", row_sf, (torch.float32,), (num_expanded_tokens,), device=device)
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (num_tokens, num_topk), device=device)
    check.one_of("fp8_format", fp8_format, ("", "e4m3"))
    if sf is not None:
        check.require(fp8_format != "", "sf", "None without fp8_format, since only FP8 outputs are scaled", "a tensor")
        check.tensor("sf", sf, (torch.float32,), (1,), device=device)
    out_dtype = torch.float8_e4m3fn if fp8_format else x.dtype
    out = given_or_new("out", out, x, (num_tokens, hidden), out_dtype)
    if launching(out):
        factors = Factors(row_sf is not None, topk_weights is not None, sf is not None)
        reduce = _reduce_fused_kernel(hidden, num_topk, x.dtype, out_dtype, factors, get_arch(device))
        reduce(x, row_sf, topk_weights, token_topk_to_pos, sf, out)
    return out


@op
def expand_to_fused_bwd(grad_rows: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused` with respect to x: each token's sum of the gradients of its copies.

    The slots are added from the first to the last in float32, and the sum is rounded to the dtype of grad_rows. Rows of
    padding, which no position names, are not read.

    Args:
        grad_rows: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0. (`expand_to_fused`
            itself takes any hidden and dtype.)
        token_topk_to_pos: int32 (num_tokens, num_topk); negative means none, and a position past the last row is
            ignored (`TK_DEBUG=1` raises ValueError).

    Returns:
        (num_tokens, hidden) of grad_rows' dtype; zeros for a token without any position.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device.
    """
    num_expanded_tokens, hidden = check.tensor("grad_rows", grad_rows, _INPUT_DTYPES, ("num_expanded_tokens", "hidden"))
    check.multiple_of("hidden (columns of grad_rows)", hidden, 64)
    num_tokens, num_topk = check_positions(token_topk_to_pos, "num_tokens", num_expanded_tokens, grad_rows.device)
    grad_x = new(grad_rows.new_empty, (num_tokens, hidden))
    if launching(grad_x):
        factors, arch = Factors(False, False, False), get_arch(grad_rows.device)
        reduce = _reduce_fused_kernel(hidden, num_topk, grad_rows.dtype, grad_rows.dtype, factors, arch)
        reduce(grad_rows, None, None, token_topk_to_pos, None, grad_x)
    return grad_x
