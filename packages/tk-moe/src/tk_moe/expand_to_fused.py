"""expand_to_fused: each token's row to its positions in the experts' segments; expand_to_fused_with_sf: its factors.

    out[token_topk_to_pos[t, k]] = x[t]     for every position that is not negative
    out[p] = 0                              where pos_to_expert[p] < 0 (padding)

x (num_tokens, hidden), token_topk_to_pos int32 (num_tokens, num_topk), pos_to_expert int32 (num_expanded_tokens),
out (num_expanded_tokens, hidden).

One launch writes every row once. Of G blocks, block b reads row b of x into registers, in vectors of up to 16 bytes,
and stores it to its positions; then it zeroes the padding among the rows b, b + G, b + 2G, ... Padding stands in runs,
at the end of each segment and after the last one, and this deals a run out to as many blocks as it has rows.

    x       row b ──registers──┬────────────┬─────────────┐           (read once, stored up to num_topk times)
    out             ...      [ p0 ]  ...  [ p1 ] [ pad ] [ p2 ]       (row p of padding: zeroed by block p mod G)
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
from tk_core.scales import ScaleLayout, empty_scales

_E2M1_DTYPES = tuple(
    getattr(torch, name) for name in ("int8", "uint8", "float4_e2m1fn_x2") if hasattr(torch, name)
)  # two FP4 codes a byte
_QUANTIZED_DTYPES = (torch.float8_e4m3fn, *_E2M1_DTYPES)

# Dtypes that a kernel takes as they are; a row of any other is the same bytes under the carrier of its width.
_NATIVE_DTYPES = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn)
)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class ExpandConfig:
    """How one block copies a row."""

    threads: int
    vectors_per_thread: int
    """Vectors of a row that a thread holds in registers at a time."""

    max_padding_rows = 8
    """Rows that one block looks through for padding, at most the 32 lanes of a warp. Untuned."""

    @staticmethod
    @cache
    def best(num_vectors: int, arch: Arch) -> "ExpandConfig":
        """Knobs for rows of `num_vectors` vectors: up to 256 threads × 4 vectors at a time. Untuned."""
        chunks = ceil_div(num_vectors, 256 * 4)
        chunk = ceil_div(num_vectors, chunks)
        vectors_per_thread = ceil_div(chunk, 256)
        return ExpandConfig(align(ceil_div(chunk, vectors_per_thread), 32), vectors_per_thread)


# Every access stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _expand_kernel(
    cols: int,
    num_topk: int,
    dtype: torch.dtype,
    vector_bytes: int,
    sf_cols: int,
    sf_dtype: torch.dtype | None,
    config: ExpandConfig,
    arch: Arch,
) -> Any:
    """Copy rows of `cols` elements in vectors of `vector_bytes`, and rows of `sf_cols` 4-byte factors beside them."""
    import tilelang.language as T

    word = {1: "uint8", 2: "uint16"}.get(vector_bytes, "uint32")
    word_bytes = min(vector_bytes, 4)
    lanes = vector_bytes // word_bytes
    row_words = cols * dtype.itemsize // word_bytes
    num_vectors = row_words // lanes
    threads, vectors_per_thread = config.threads, config.vectors_per_thread
    num_chunks = ceil_div(num_vectors, threads * vectors_per_thread)
    sf_per_thread = ceil_div(sf_cols, threads)

    num_tokens = T.dynamic("num_tokens")
    num_expanded_tokens = T.dynamic("num_expanded_tokens")
    sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
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
        # Row block + lane * num_blocks is this lane's to look at; every warp looks for itself.
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
        sf: T.StridedTensor((num_tokens, sf_cols), (sf_row_stride, sf_col_stride), sf_dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_expanded_tokens,), "int32"),
        out: T.Tensor((num_expanded_tokens, cols), dtype),
        out_sf: T.StridedTensor((num_expanded_tokens, sf_cols), (out_sf_row_stride, out_sf_col_stride), sf_dtype),
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            tx = T.get_thread_binding()
            x_words = T.view(x, (num_tokens, row_words), word)
            out_words = T.view(out, (num_expanded_tokens, row_words), word)
            pos = T.alloc_local((num_topk,), "int32")
            expert = T.alloc_local((1,), "int32")
            factors = T.alloc_local((sf_per_thread,), sf_dtype)
            load_maps(block, num_blocks, tx, token_topk_to_pos, pos_to_expert, pos, expert)
            for j in T.unroll(sf_per_thread):
                if block < num_tokens and j * threads + tx < sf_cols:
                    factors[j] = sf[block, j * threads + tx]
            copy_row(block, tx, pos, x_words, out_words)
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
                    for j in T.unroll(sf_per_thread):
                        if j * threads + tx < sf_cols:
                            out_sf[block + i * num_blocks, j * threads + tx] = T.cast(0, sf_dtype)

    return expand_to_fused_with_sf


def _launch_plan(
    x: torch.Tensor, out: torch.Tensor, arch: Arch
) -> tuple[torch.Tensor, torch.Tensor, int, ExpandConfig, int]:
    """Both tensors in a dtype that kernels take, the widest vector that fits all rows, knobs, and how many blocks."""
    if x.dtype not in _NATIVE_DTYPES:
        carrier = _CARRIERS[x.dtype.itemsize]
        x, out = x.view(carrier), out.view(carrier)
    num_tokens, cols = x.shape
    row_bytes = cols * x.dtype.itemsize
    bits = row_bytes | x.data_ptr() | out.data_ptr() | 16
    vector_bytes = bits & -bits
    num_blocks = max(num_tokens, -(-out.shape[0] // ExpandConfig.max_padding_rows))
    return x, out, vector_bytes, ExpandConfig.best(row_bytes // vector_bytes, arch), num_blocks


def _expand_reference(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor, out: torch.Tensor
) -> None:
    from tk_moe.reference.expand_to_fused import expand_to_fused

    out.copy_(expand_to_fused(x, token_topk_to_pos, pos_to_expert))


@op("tk_moe::expand_to_fused_out", mutates=("out",), reference=_expand_reference)
def _expand_to_fused_out(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor, out: torch.Tensor
) -> None:
    """Launch."""
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    x, out, vector_bytes, config, num_blocks = _launch_plan(x, out, arch)
    expand = _expand_kernel(x.shape[1], token_topk_to_pos.shape[1], x.dtype, vector_bytes, 0, None, config, arch)
    expand(x, token_topk_to_pos, pos_to_expert, out, num_blocks)


def _expand_with_sf_reference(
    x: torch.Tensor,
    sf: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
) -> None:
    from tk_moe.reference.expand_to_fused import expand_to_fused

    out.copy_(expand_to_fused(x, token_topk_to_pos, pos_to_expert))
    out_sf.copy_(expand_to_fused(sf, token_topk_to_pos, pos_to_expert))


@op("tk_moe::expand_to_fused_with_sf_out", mutates=("out", "out_sf"), reference=_expand_with_sf_reference)
def _expand_to_fused_with_sf_out(
    x: torch.Tensor,
    sf: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
) -> None:
    """Launch."""
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    x, out, vector_bytes, config, num_blocks = _launch_plan(x, out, arch)
    expand = _expand_kernel(
        x.shape[1], token_topk_to_pos.shape[1], x.dtype, vector_bytes, sf.shape[1], sf.dtype, config, arch
    )
    expand(x, sf, token_topk_to_pos, pos_to_expert, out, out_sf, num_blocks)


def _check_maps(token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> None:
    """With TK_DEBUG: raise unless the positions are exactly the rows that belong to an expert, each once."""
    if pos_to_expert.is_meta:
        return
    num_expanded_tokens = pos_to_expert.shape[0]
    positions = token_topk_to_pos[token_topk_to_pos >= 0].long()
    high = int(positions.max()) if positions.numel() else -1
    check.require(high < num_expanded_tokens, "token_topk_to_pos", f"positions below {num_expanded_tokens}", high)
    wrong = torch.bincount(positions, minlength=num_expanded_tokens) != (pos_to_expert >= 0)
    where = wrong.nonzero().flatten()[:4].tolist()
    check.require(
        not where, "token_topk_to_pos", "each row with pos_to_expert >= 0 once and no other", f"else at rows {where}"
    )


@replayable
def expand_to_fused(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """Copy each token's row to its positions in the experts' segments; padding rows become zero.

    Args:
        x: (num_tokens, hidden), any dtype of 1 to 4 bytes, contiguous.
        token_topk_to_pos: int32 (num_tokens, num_topk), as `get_fused_mapping` gives it; negative means none, and a
            position past the last row is ignored.
        pos_to_expert: int32 (num_expanded_tokens,); negative marks padding. Every other row must be the position of
            exactly one (token, slot), else its contents are unspecified (`TK_DEBUG=1` raises ValueError).

    Returns:
        (num_expanded_tokens, hidden) of x's dtype, contiguous; exactly the bits of x.

    Raises:
        TypeError: x is wider than 4 bytes an element, or a map is not int32.
        ValueError: a shape, stride or device does not fit.
    """
    if not isinstance(x, torch.Tensor) or x.dtype.itemsize > 4:
        check.require_type(False, "x", "a torch.Tensor with 1 to 4 bytes an element", getattr(x, "dtype", type(x)))
    num_tokens, hidden = check.tensor("x", x, (x.dtype,), ("num_tokens", "hidden"))
    device = x.device
    _, num_topk = check.tensor(
        "token_topk_to_pos", token_topk_to_pos, (torch.int32,), (num_tokens, "num_topk"), device=device
    )
    check.require(num_topk >= 1, "token_topk_to_pos", "at least one slot a token", num_topk)
    (num_expanded_tokens,) = check.tensor(
        "pos_to_expert", pos_to_expert, (torch.int32,), ("num_expanded_tokens",), device=device
    )
    if not torch.compiler.is_compiling() and env.debug():
        _check_maps(token_topk_to_pos, pos_to_expert)
    out = x.new_empty((num_expanded_tokens, hidden))
    _expand_to_fused_out(x, token_topk_to_pos, pos_to_expert, out)
    return out


@replayable
def expand_to_fused_with_sf(
    x: tuple[torch.Tensor, torch.Tensor],
    num_per_channels: int,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_to_fused` of a quantized pair: rows and their scale factors in one launch.

    Args:
        x: (data, sf). data (num_tokens, hidden) float8_e4m3fn, or (num_tokens, hidden / 2) int8, uint8 or
            float4_e2m1fn_x2 with two e2m1 codes a byte, contiguous. sf row-major, one factor for `num_per_channels`
            columns of a row: float32 (num_tokens, C), C = ceil(hidden / num_per_channels), or packed UE8M0 int32
            (num_tokens, ceil(C / 4)).
        num_per_channels: 32 or 128.
        token_topk_to_pos, pos_to_expert: as in `expand_to_fused`.
        use_tma_aligned_col_major_sf: give sf' column major, strides (1, align(num_expanded_tokens, 4)); packed factors
            need it.

    Returns:
        (data', sf') with num_expanded_tokens rows; in padding rows both are zero. sf' is contiguous without the flag.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride, device or flag.
    """
    check.require_type(isinstance(x, tuple | list) and len(x) == 2, "x", "a pair (data, sf)", type(x))
    data, sf = x
    num_tokens, cols = check.tensor("x[0]", data, _QUANTIZED_DTYPES, ("num_tokens", "hidden"))
    check.one_of("num_per_channels", num_per_channels, (32, 128))
    device = data.device
    hidden = cols if data.dtype is torch.float8_e4m3fn else 2 * cols
    num_sf = ceil_div(hidden, num_per_channels)
    packed = getattr(sf, "dtype", None) is torch.int32
    check.tensor(
        "x[1]",
        sf,
        (torch.float32, torch.int32),
        (num_tokens, ceil_div(num_sf, 4) if packed else num_sf),
        device=device,
    )
    check.require(
        use_tma_aligned_col_major_sf or not packed,
        "use_tma_aligned_col_major_sf",
        "True, since x[1] is packed UE8M0",
        use_tma_aligned_col_major_sf,
    )
    _, num_topk = check.tensor(
        "token_topk_to_pos", token_topk_to_pos, (torch.int32,), (num_tokens, "num_topk"), device=device
    )
    check.require(num_topk >= 1, "token_topk_to_pos", "at least one slot a token", num_topk)
    (num_expanded_tokens,) = check.tensor(
        "pos_to_expert", pos_to_expert, (torch.int32,), ("num_expanded_tokens",), device=device
    )
    if not torch.compiler.is_compiling() and env.debug():
        _check_maps(token_topk_to_pos, pos_to_expert)
    layout = ScaleLayout.ROW_MAJOR
    if use_tma_aligned_col_major_sf:
        layout = ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.COL_MAJOR
    out = data.new_empty((num_expanded_tokens, cols))
    out_sf = empty_scales(data, num_expanded_tokens, num_sf, layout)
    _expand_to_fused_with_sf_out(data, sf, token_topk_to_pos, pos_to_expert, out, out_sf)
    return out, out_sf
