"""reduce_fused: each token's weighted sum of the rows that its experts gave, gathered from their segments.

    acc = 0;  acc = fma(x[pos], weight * sf[pos], acc)  for k = 0, 1, ... with pos = token_topk_to_pos[t, k] >= 0
    out[t] = round(acc)                                 or, in e4m3, round(float32(acc * output scalar))

x (num_expanded_tokens, hidden) bf16 or float32 with an optional float32 factor for each row, weights float32
(num_tokens, num_topk) or none, out (num_tokens, hidden) in x's dtype or e4m3. All in float32, each operation rounded to
nearest even, so every bit is defined.

A thread serves one 16-byte vector of a token's columns: it asks for the vectors of all num_topk rows (16 at most)
before it uses the first, so that the memory has num_topk * 16 bytes to fetch for every thread. Blocks are small, so
that those which only start or only wait stand beside others that load.

    x     [ p0 | block 0: thread 0, 1, ... | block 1 | ... ]     out  [ token | block 0: thread 0, 1, ... | ... ]
          [ p1 | block 0: thread 0, 1, ... | block 1 | ... ]
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable

_INPUT_DTYPES = (torch.bfloat16, torch.float32)
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class ReduceConfig:
    """How the columns of a token are dealt out to blocks."""

    threads: int
    num_chunks: int
    """Blocks a token, a vector for each thread."""

    max_rows_in_flight = 16
    """Rows that a thread asks for before it uses the first; 4 registers each, and 255 are all there are."""

    @staticmethod
    @cache
    def best(num_vectors: int, arch: Arch) -> "ReduceConfig":
        """Knobs for rows of `num_vectors` vectors: of up to 128 threads a block, the number that leaves fewest idle."""
        threads = min((128, 96, 64, 32), key=lambda threads: align(num_vectors, threads))
        return ReduceConfig(threads, ceil_div(num_vectors, threads))

    def blocks_per_sm(self, num_topk: int, has_out_sf: bool) -> int:
        """Blocks that a multiprocessor should hold: as many as the registers for the rows in flight allow."""
        few = 768 if has_out_sf else 1024
        return (few if num_topk <= 8 else 512 if num_topk <= 16 else 256) // self.threads


# Every access to x and out stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _reduce_kernel(
    hidden: int,
    num_topk: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    lanes: int,
    has_row_sf: bool,
    has_weights: bool,
    has_out_sf: bool,
    config: ReduceConfig,
    arch: Arch,
) -> Any:
    """Sum rows in vectors of `lanes` elements; the tensors that a flag denies are left out of the arguments."""
    import tilelang.language as T

    threads = config.threads
    rows_in_flight = min(num_topk, config.max_rows_in_flight)
    num_vectors = hidden // lanes
    out_bytes = lanes * out_dtype.itemsize

    num_tokens = T.dynamic("num_tokens")
    num_expanded_tokens = T.dynamic("num_expanded_tokens")

    @T.prim_func
    def reduce_fused(
        x: T.Tensor((num_expanded_tokens, hidden), dtype),
        row_sf: T.Tensor((num_expanded_tokens,), "float32"),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out_sf: T.Tensor((1,), "float32"),
        out: T.Tensor((num_tokens, hidden), out_dtype),
    ) -> None:
        with T.Kernel(num_tokens * config.num_chunks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm(num_topk, has_out_sf))
            tx = T.get_thread_binding()
            token = block // config.num_chunks
            vector = block % config.num_chunks * threads + tx
            pos = T.alloc_local((num_topk,), "int32")
            scale = T.alloc_local((num_topk,), "float32")
            rows = T.alloc_local((rows_in_flight, lanes), dtype)
            acc = T.alloc_local((lanes,), "float32")
            rounded = T.alloc_local((lanes,), out_dtype)
            for k in T.unroll(num_topk):
                pos[k] = token_topk_to_pos[token, k]
            for k in T.unroll(num_topk):
                if has_weights:
                    scale[k] = topk_weights[token, k]
                else:
                    scale[k] = T.float32(1)
            if has_row_sf:
                for k in T.unroll(num_topk):
                    if pos[k] >= 0 and pos[k] < num_expanded_tokens:
                        scale[k] = scale[k] * row_sf[pos[k]]
            if vector < num_vectors:
                for v in T.unroll(lanes):
                    acc[v] = T.float32(0)
                for group in T.unroll(ceil_div(num_topk, rows_in_flight)):
                    for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                        k = group * rows_in_flight + i
                        if pos[k] >= 0 and pos[k] < num_expanded_tokens:
                            for v in T.vectorized(lanes):
                                rows[i, v] = x[pos[k], vector * lanes + v]
                    for i in T.unroll(T.min(rows_in_flight, num_topk - group * rows_in_flight)):
                        k = group * rows_in_flight + i
                        if pos[k] >= 0 and pos[k] < num_expanded_tokens:
                            for v in T.unroll(lanes):
                                acc[v] = T.ieee_fmaf(T.cast(rows[i, v], "float32"), scale[k], acc[v])
                if has_out_sf:
                    for v in T.unroll(lanes):
                        acc[v] = acc[v] * out_sf[0]
                for v in T.vectorized(lanes):
                    rounded[v] = T.cast(acc[v], out_dtype)
                if out_bytes == 16:
                    T.stg128(out[token, vector * lanes], T.view(rounded, (4,), "uint32")[0:4])
                elif out_bytes == 8:
                    T.stg64(out[token, vector * lanes], T.view(rounded, (2,), "uint32")[0:2])
                else:
                    for v in T.vectorized(lanes):
                        out[token, vector * lanes + v] = rounded[v]

    return reduce_fused


def _reduce_fused_reference(
    x: torch.Tensor,
    row_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    sf: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    from tk_moe.reference.reduce.reduce_fused import reduce_fused

    fp8_format = "e4m3" if out.dtype == torch.float8_e4m3fn else ""
    reduce_fused(x if row_sf is None else (x, row_sf), topk_weights, token_topk_to_pos, fp8_format, sf, out)


@op("tk_moe::reduce_fused_out", mutates=("out",), reference=_reduce_fused_reference)
def _reduce_fused_out(
    x: torch.Tensor,
    row_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    sf: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch."""
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    hidden = out.shape[1]
    dtype = x.dtype
    # A view into a larger tensor may start anywhere; one element at a time works there.
    lanes = 1 if (x.data_ptr() | out.data_ptr()) % _VECTOR_BYTES else _VECTOR_BYTES // dtype.itemsize
    config = ReduceConfig.best(hidden // lanes, arch)
    reduce = _reduce_kernel(
        hidden,
        token_topk_to_pos.shape[1],
        dtype,
        out.dtype,
        lanes,
        row_sf is not None,
        topk_weights is not None,
        sf is not None,
        config,
        arch,
    )
    reduce(x, row_sf, topk_weights, token_topk_to_pos, sf, out)


def _check_positions(token_topk_to_pos: torch.Tensor, num_expanded_tokens: int) -> None:
    """With TK_DEBUG: raise if a position lies past the last row."""
    if token_topk_to_pos.numel() == 0 or token_topk_to_pos.is_meta:
        return
    high = int(token_topk_to_pos.max())
    check.require(high < num_expanded_tokens, "token_topk_to_pos", f"positions below {num_expanded_tokens}", high)


@replayable
def reduce_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's rows from the experts' segments, weighted: the inverse of `expand_to_fused`.

    In float32, for k = 0, 1, ... with pos = token_topk_to_pos[t, k] >= 0:
    acc = fma(x[pos], topk_weights[t, k] * sf[pos], acc), starting from 0; a missing factor is 1. A token without any
    position gets zeros.

    Args:
        x: (num_expanded_tokens, hidden) bfloat16 or float32, contiguous, hidden % 64 == 0; or a pair of it and a
            float32 factor for each row (num_expanded_tokens,).
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
    if not isinstance(x, torch.Tensor):
        check.require_type(
            isinstance(x, tuple | list) and len(x) == 2, "x", "a torch.Tensor or a pair (x, sf)", type(x)
        )
        x, row_sf = x
    num_expanded_tokens, hidden = check.tensor("x", x, _INPUT_DTYPES, ("num_expanded_tokens", "hidden"))
    check.multiple_of("hidden (columns of x)", hidden, 64)
    device = x.device
    num_tokens, num_topk = check.tensor(
        "token_topk_to_pos", token_topk_to_pos, (torch.int32,), ("num_tokens", "num_topk"), device=device
    )
    check.require(num_topk >= 1, "token_topk_to_pos", "at least one slot a token", num_topk)
    if row_sf is not None:
        check.tensor("x[1]", row_sf, (torch.float32,), (num_expanded_tokens,), device=device)
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (num_tokens, num_topk), device=device)
    check.one_of("fp8_format", fp8_format, ("", "e4m3"))
    if sf is not None:
        check.require(fp8_format != "", "sf", "None without fp8_format, since only FP8 outputs are scaled", "a tensor")
        check.tensor("sf", sf, (torch.float32,), (1,), device=device)
    out_dtype = torch.float8_e4m3fn if fp8_format else x.dtype
    if not torch.compiler.is_compiling() and env.debug():
        _check_positions(token_topk_to_pos, num_expanded_tokens)
    if out is None:
        out = x.new_empty((num_tokens, hidden), dtype=out_dtype)
    else:
        check.tensor("out", out, (out_dtype,), (num_tokens, hidden), device=device)
        inputs = {
            "x": x,
            "x[1]": row_sf,
            "topk_weights": topk_weights,
            "token_topk_to_pos": token_topk_to_pos,
            "sf": sf,
        }
        check.apart("out", out, **inputs)
    _reduce_fused_out(x, row_sf, topk_weights, token_topk_to_pos, sf, out)
    return out
