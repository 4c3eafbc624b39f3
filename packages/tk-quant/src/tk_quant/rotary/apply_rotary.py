"""apply_rotary: turn pairs of channels of queries and keys by the angles of their tokens' positions (RoPE).

With f, s the pair i of a head, channels 2i and 2i + 1 where they are interleaved, else i and i + rot / 2, and cos, sin
in column i of the row of the token's position:

    f' = fma(f, cos, -(s · sin));  s' = fma(f, sin, s · cos)        conjugate: -sin for sin

in float32, the products in brackets rounded, then rounded to the dtype. Source: arXiv 2104.09864; the order of the
roundings is that of DeepSeek's TileKernels 2.1.0. The backward is the conjugate on the gradient.

A row is one head of one token. A thread holds 16 bytes of each half of a row, or 16 bytes of interleaved pairs, of two
or four rows. Thread blocks for queries come first, then those for keys:

              first half      second half            interleaved
    row 0   [ t0 t1 t2 t3 ] [ t0 t1 t2 t3 ]      [ t0 t1 t2 t3 t4 t5 t6 t7 ]      bfloat16, 64 channels
        1   [ t4 t5 t6 t7 ] [ t4 t5 t6 t7 ]      [ t8 …                    ]
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_core.tiles import DIRECT_COPIES

_DTYPES = (torch.bfloat16, torch.float32)
_POSITION_DTYPES = (torch.int32, torch.int64)
_THREADS = 128
_MOST_ROWS = 2**31 - 2**12
"""Rows are counted in int32, those of a tile past the last row too."""

# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


@dataclass(frozen=True)
class RotarySource:
    """What a kernel reads: dtypes, dimensions, and the alignment in bytes of rows."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    position_dtype: torch.dtype | None
    """None: a token's position is its index."""
    is_batched: bool
    """Whether tokens are those of several sequences."""
    has_cache_of_sequences: bool
    """Whether each sequence has a cache of its own."""
    has_sin_cache: bool
    """Whether sin is a tensor of its own, not the right half of the cache."""
    has_key: bool
    is_interleaved: bool
    alignment: int
    cache_alignment: int


class _Angles(NamedTuple):
    """Where a kernel finds a token's cos and sin."""

    cos_cache: Any
    sin_cache: Any
    positions: Any
    seqlen_offset: Any
    direction: Any
    """1, or -1 for the conjugate."""


@kernel(pass_configs=_PASS_CONFIGS)
def _apply_rotary_kernel(rot: int, rest: int, of: RotarySource, arch: Arch) -> Any:
    """Build the kernel for heads of which `rot` channels turn, and the `rest` behind them are copied."""
    import tilelang.language as T

    half, dtype, itemsize = rot // 2, T.dtype(of.dtype), of.dtype.itemsize
    vec = 8 // itemsize if of.is_interleaved else min(16 // itemsize, half & -half)
    # A row takes a power of two of threads; the last may have no channels.
    lanes = 1 << (ceil_div(half, vec) - 1).bit_length()
    rows = (4 if of.is_interleaved else 2) * _THREADS // lanes
    batch, num_tokens, head_dim = T.dynamic("batch"), T.dynamic("num_tokens"), T.dynamic("head_dim")
    query_heads, key_heads = T.dynamic("query_heads"), T.dynamic("key_heads")
    tokens = (batch, num_tokens) if of.is_batched else (num_tokens,)
    sequences = (batch,) if of.has_cache_of_sequences else ()
    cache_shape = (*sequences, T.dynamic("cache_rows"), half if of.has_sin_cache else rot)

    def strided(name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> Any:
        strides = (T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(len(shape) - 1))
        return T.StridedTensor(shape, (*strides, 1), T.dtype(dtype))

    def in_memory(pair: Any, side: Any) -> tuple[Any, Any]:
        """A thread's pair, and which of its two channels, in the order of memory."""
        return (pair, side) if of.is_interleaved else (side, pair)

    def place(row: Any, lane: Any, *registers: Any) -> tuple[Any, Any]:
        """(thread, register) of an element of a tile (rows, lanes, …): a thread has all behind the lanes."""
        register = (row * lanes + lane) // _THREADS
        for index, size in zip(registers, in_memory(vec, 2) if len(registers) == 2 else (vec,)):
            register = register * size + index
        return (row * lanes + lane) % _THREADS, register

    def token_of(row: Any, num_heads: Any) -> tuple[Any, ...]:
        """Index of a row's token."""
        token = T.truncdiv(row, num_heads)
        return (T.truncdiv(token, num_tokens), T.truncmod(token, num_tokens)) if of.is_batched else (token,)

    def channel_of(lane: Any, i: Any, j: Any) -> Any:
        pair, side = in_memory(i, j)
        pair = lane * vec + pair
        return 2 * pair + side if of.is_interleaved else side * half + pair

    @T.macro
    def load_angles(
        angles: _Angles, position: T.Buffer, cos: T.Buffer, sin: T.Buffer, first_row: T.int32, num_heads: T.int32
    ) -> None:
        """The rows' positions, -1 outside of the cache, and their cos and sin, turned by direction; there zeros."""
        last_row, sin_column = num_heads * num_tokens * (batch if of.is_batched else 1) - 1, cache_shape[-1] - half
        for r, lane in T.Parallel(rows, lanes):
            token = token_of(T.min(first_row + r, last_row), num_heads)
            index = token[-1] if of.position_dtype is None else angles.positions[token]
            found = T.cast(index, "int64") + angles.seqlen_offset
            position[r, lane] = T.if_then_else(found >= 0 and found < cache_shape[-2], T.cast(found, "int32"), -1)
        for r, lane, k in T.Parallel(rows, lanes, vec):
            at = (*token_of(T.min(first_row + r, last_row), num_heads)[: len(sequences)], position[r, lane])
            cos[r, lane, k] = 0
            sin[r, lane, k] = 0
            if position[r, lane] >= 0 and lane < half // vec:
                cos[r, lane, k] = T.cast(angles.cos_cache[(*at, lane * vec + k)], "float32")
                sin[r, lane, k] = T.cast(angles.sin_cache[(*at, sin_column + lane * vec + k)], "float32")

    @T.macro
    def turn(x: T.Buffer, out: T.Buffer, angles: _Angles, first_row: T.int32, num_heads: T.int32) -> None:
        num_rows = num_heads * num_tokens * (batch if of.is_batched else 1)
        tile = T.alloc_fragment((rows, lanes, *in_memory(vec, 2)), dtype)
        turned = T.alloc_fragment(tile.shape, dtype)
        cos, sin = T.alloc_fragment((rows, lanes, vec), "float32"), T.alloc_fragment((rows, lanes, vec), "float32")
        position = T.alloc_fragment((rows, lanes), "int32")
        T.annotate_layout({each: T.Fragment(each.shape, place) for each in (tile, turned, cos, sin, position)})
        for r, lane, i, j in T.Parallel(*tile.shape):
            row = first_row + r
            at = (*token_of(row, num_heads), T.truncmod(row, num_heads), channel_of(lane, i, j))
            if row < num_rows and lane < half // vec:
                tile[r, lane, i, j] = x[at]
        load_angles(angles, position, cos, sin, first_row, num_heads)
        for r, lane, k in T.Parallel(rows, lanes, vec):
            pair, found = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            for side in T.unroll(2):
                value = T.cast(tile[(r, lane, *in_memory(k, side))], "float32")
                pair[side] = T.if_then_else(position[r, lane] >= 0, value, T.float32(0))
            found[0] = T.fma(pair[0], cos[r, lane, k], pair[1] * (sin[r, lane, k] * -angles.direction))
            found[1] = T.fma(pair[0], sin[r, lane, k] * angles.direction, pair[1] * cos[r, lane, k])
            for side in T.unroll(2):
                turned[(r, lane, *in_memory(k, side))] = T.cast(found[side], dtype)
        for r, lane, i, j in T.Parallel(*tile.shape):
            row = first_row + r
            at = (*token_of(row, num_heads), T.truncmod(row, num_heads), channel_of(lane, i, j))
            if row < num_rows and lane < half // vec:
                out[at] = turned[r, lane, i, j]
        for r, c in T.Parallel(rows, rest):
            row = first_row + r
            at = (*token_of(row, num_heads), T.truncmod(row, num_heads), rot + c)
            if row < num_rows:
                out[at] = x[at]

    @T.prim_func
    def apply_rotary(
        query: strided("query", (*tokens, query_heads, head_dim), of.dtype),
        key: strided("key", (*tokens, key_heads, head_dim), of.dtype),
        out: strided("out", (*tokens, query_heads, head_dim), of.dtype),
        key_out: strided("key_out", (*tokens, key_heads, head_dim), of.dtype),
        cos_cache: strided("cos", cache_shape, of.cache_dtype),
        sin_cache: strided("sin", cache_shape, of.cache_dtype),
        positions: strided("position", tokens, of.position_dtype or torch.int32),
        seqlen_offset: T.int64,
        direction: T.float32,
    ) -> None:
        num_rows = num_tokens * (batch if of.is_batched else 1)
        query_blocks = T.ceildiv(num_rows * query_heads, rows)
        key_blocks = T.ceildiv(num_rows * key_heads, rows) if of.has_key else 0
        with T.Kernel(query_blocks + key_blocks, threads=_THREADS) as block:
            key_strides = (*key.strides[:-1], *key_out.strides[:-1]) if of.has_key else ()
            for stride in (*query.strides[:-1], *out.strides[:-1], *key_strides):
                T.assume(stride % (of.alignment // itemsize) == 0)
            sin_strides = sin_cache.strides[:-1] if of.has_sin_cache else ()
            for stride in (*cos_cache.strides[:-1], *sin_strides):
                T.assume(stride % (of.cache_alignment // of.cache_dtype.itemsize) == 0)
            at = (cos_cache, sin_cache if of.has_sin_cache else cos_cache, positions, seqlen_offset, direction)
            if of.has_key:
                if block < query_blocks:
                    turn(query, out, _Angles(*at), block * rows, query_heads)
                else:
                    turn(key, key_out, _Angles(*at), (block - query_blocks) * rows, key_heads)
            else:
                turn(query, out, _Angles(*at), block * rows, query_heads)

    return apply_rotary


def _check(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
    sin_cache: Tensor | None,
) -> int:
    """Check what is read; return the number of channels that turn."""
    *tokens, _, head_dim = check.tensor(
        "query", query, _DTYPES, (..., "num_tokens", "heads", "head_dim"), layout="rows"
    )
    if len(tokens) > 2:
        check.require(False, "query", "3 or 4 dimensions", query.ndim)
    device, heads = query.device, "key_heads"
    if key is not None:
        check.tensor("key", key, (query.dtype,), (*tokens, heads, head_dim), layout="rows", device=device)
    has_sequences = isinstance(cos_sin_cache, Tensor) and cos_sin_cache.ndim == 3 and len(tokens) == 2
    cache_shape = (tokens[0], "cache_rows", "rot") if has_sequences else ("cache_rows", "rot")
    found = check.tensor("cos_sin_cache", cos_sin_cache, _DTYPES, cache_shape, layout="rows", device=device)
    rot = found[-1]
    if sin_cache is not None:
        check.tensor("sin_cache", sin_cache, (cos_sin_cache.dtype,), tuple(found), layout="rows", device=device)
        rot *= 2
    columns = "8 to 256 columns, a multiple of 4" if sin_cache is not None else "16 to 512 columns, a multiple of 8"
    check.require(16 <= rot <= 512 and rot % 8 == 0, "cos_sin_cache", columns, found[-1])
    check.require(rot <= head_dim, "cos_sin_cache", "cos and sin for at most {} channels", rot, head_dim)
    if positions is not None:
        check.tensor("positions", positions, _POSITION_DTYPES, tuple(tokens), layout="rows", device=device)
    check.flag("interleaved", interleaved)
    check.flag("conjugate", conjugate)
    check.integer("seqlen_offset", seqlen_offset)
    for name, x in (("query", query), ("key", key)):
        if x is not None:
            most = _MOST_ROWS * head_dim
            check.require(x.numel() <= most, name, "at most {} heads of tokens", x.numel(), _MOST_ROWS)
    if check.reads_data(query) and query.numel():
        name = "seqlen_offset" if positions is None else "positions"
        ends = (0, tokens[-1] - 1) if positions is None else positions.aminmax()
        ends = [int(end) + seqlen_offset for end in ends]
        check.require(ends[0] >= 0 and ends[1] < found[-2], name, "positions from 0 to {}", ends, found[-2] - 1)
    return rot


def _launch(
    read: tuple[Tensor, Tensor | None],
    written: tuple[Tensor, Tensor | None],
    cos_sin_cache: Tensor,
    sin_cache: Tensor | None,
    positions: Tensor | None,
    flags: tuple[bool, bool],
    seqlen_offset: int,
    rot: int,
) -> None:
    query, has_key = read[0], read[1] is not None
    source = RotarySource(
        query.dtype,
        cos_sin_cache.dtype,
        None if positions is None else positions.dtype,
        query.ndim == 4,
        cos_sin_cache.ndim == 3,
        sin_cache is not None,
        has_key,
        flags[0],
        min(check.row_alignment(x) for x in (*read, *written) if x is not None),
        min(check.row_alignment(x) for x in (cos_sin_cache, sin_cache) if x is not None),
    )
    rest = 0 if written[0] is query else query.shape[-1] - rot
    rotate = _apply_rotary_kernel(rot, rest, source, get_arch(query.device))
    rotate(*read, *written, cos_sin_cache, sin_cache, positions, seqlen_offset, -1.0 if flags[1] else 1.0)


@op(writes=("query", "key"), aligned=(), reference="apply_rotary")
def _apply_rotary_in_place(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
    *,
    sin_cache: Tensor | None,
) -> None:
    rot = _check(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset, sin_cache)
    if launching(query, key):
        flags = interleaved, conjugate
        _launch((query, key), (query, key), cos_sin_cache, sin_cache, positions, flags, seqlen_offset, rot)


@op(writes=("out", "key_out"), aligned=(), reference="apply_rotary")
def _apply_rotary_to_out(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
    *,
    sin_cache: Tensor | None,
    out: Tensor,
    key_out: Tensor | None,
) -> None:
    rot = _check(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset, sin_cache)
    if (key is None) != (key_out is None):
        expected = "None without key" if key is None else "a tensor beside key and out"
        check.require(False, "key_out", expected, type(key_out).__name__)
    check.tensor("out", out, (query.dtype,), tuple(query.shape), layout="rows", device=query.device)
    if key is not None:
        check.tensor("key_out", key_out, (key.dtype,), tuple(key.shape), layout="rows", device=key.device)
    if launching(out, key_out):
        flags = interleaved, conjugate
        _launch((query, key), (out, key_out), cos_sin_cache, sin_cache, positions, flags, seqlen_offset, rot)


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
    *,
    sin_cache: Tensor | None = None,
    out: Tensor | None = None,
    key_out: Tensor | None = None,
) -> None:
    """Rotary position embedding: turn pairs of channels of query, and of key, by the angles of their tokens' positions.

    Of each head the first rot channels turn, in pairs (f, s) of channels 2i and 2i + 1 if `interleaved`, else i and
    i + rot / 2; the others stay. With cos and sin of column i, in the row of the token's position:

        f' = fma(f, cos, -(s · sin));  s' = fma(f, sin, s · cos)

    in float32, then rounded to the dtype: every bit is defined. A token whose position is outside of the cache gets
    zeros (`TK_DEBUG=1` raises ValueError). Source: arXiv 2104.09864; names and roundings are those of DeepSeek's
    TileKernels 2.1.0, which has neither `sin_cache`, `out`, `key_out` nor channels that stay.

    Args:
        query: bfloat16 or float32 (num_tokens, heads, D) or (batch, num_tokens, heads, D), any strides but 1 in the
            last dimension. It is written in place, unless `out` is given.
        cos_sin_cache: cos in the left half of the columns, sin in the right, float32 or bfloat16 (L, rot), or for each
            sequence of a batch (batch, L, rot); rows may be strided. rot is a multiple of 8, 16 to 512, at most D.
        key: As query, with heads of its own, turned by the same launch.
        positions: int32 or int64 (num_tokens) or (batch, num_tokens), sequences at any stride; None for 0, 1, 2, …
        interleaved: Whether the channels of a pair are neighbours.
        conjugate: Turn back, with -sin for sin: the inverse, and the backward when applied to the gradient.
        seqlen_offset: Is added to all positions, in int64.
        sin_cache: sin alone, like cos_sin_cache, which has cos alone then; both (…, L, rot / 2).
        out, key_out: Tensors like query and key to write to, which overlap no argument; query and key stay as they are.
            Both or neither if there is a key.

    Raises:
        TypeError: An argument is no tensor of its dtype, or no bool or int where one is expected.
        ValueError: A shape, stride or device does not fit, or tensors that are written overlap others.
    """
    options = (query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    if out is None and key_out is None:
        _apply_rotary_in_place(*options, sin_cache=sin_cache)
    else:
        _apply_rotary_to_out(*options, sin_cache=sin_cache, out=out, key_out=key_out)
