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

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_quant.rotary.arguments import PASS_CONFIGS, RotarySource, check_heads, check_outs

_THREADS = 128


@kernel(pass_configs=PASS_CONFIGS)
def _apply_rotary_kernel(rot: int, rest: int, of: RotarySource, arch: Arch) -> Any:
    """Build the kernel for heads of which `rot` channels turn, and the `rest` behind them are copied."""
    import tilelang.language as T

    from tk_quant.rotary import steps
    from tk_quant.rotary.steps import strided

    dtype, pairs = T.dtype(of.dtype), steps.pairs_of(rot, of, _THREADS)
    rows, lanes, vec = pairs[:3]
    head_dim, query_heads, key_heads = (T.dynamic(name) for name in ("head_dim", "query_heads", "key_heads"))
    tokens, cache_shape = steps.shapes(rot, of)

    @T.macro
    def turn(x: T.Buffer, out: T.Buffer, angles: steps.Angles, first_row: T.int32, num_heads: T.int32) -> None:
        token_at, places = steps.rows_from(first_row, num_heads, tokens), steps.Places.of(rows, tokens)
        row_at = places.rows(token_at)
        tile, turned = T.alloc_fragment(pairs.tile, dtype), T.alloc_fragment(pairs.tile, dtype)
        cos, sin = T.alloc_fragment((rows, lanes, vec), "float32"), T.alloc_fragment((rows, lanes, vec), "float32")
        position = T.alloc_fragment((rows, lanes), "int32")
        T.annotate_layout({each: pairs.layout(each.shape) for each in (tile, turned, cos, sin, position)})
        steps.set_places(places, token_at, tokens)
        steps.load_pairs(x, tile, row_at, pairs)
        steps.load_positions(angles, position, row_at, of)
        steps.load_angles(angles, position, cos, sin, row_at, pairs, of)
        steps.turn(tile, turned, position, cos, sin, angles.direction, pairs)
        steps.store_pairs(turned, out, row_at, pairs)
        steps.copy_rest(x, row_at, out, row_at, rot, rest, (rows, rest))

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
        query_blocks = T.ceildiv(steps.num_tokens(tokens) * query_heads, rows)
        key_blocks = T.ceildiv(steps.num_tokens(tokens) * key_heads, rows) if of.has_key else 0
        with T.Kernel(query_blocks + key_blocks, threads=_THREADS) as block:
            key_strides = (*key.strides[:-1], *key_out.strides[:-1]) if of.has_key else ()
            strides = (*query.strides[:-1], *out.strides[:-1], *key_strides)
            steps.assume_alignment(strides, of.alignment // of.dtype.itemsize)
            strides = (*cos_cache.strides[:-1], *(sin_cache.strides[:-1] if of.has_sin_cache else ()))
            steps.assume_alignment(strides, of.cache_alignment // of.cache_dtype.itemsize)
            at = (cos_cache, sin_cache if of.has_sin_cache else cos_cache, positions, seqlen_offset, direction)
            if of.has_key:
                if block < query_blocks:
                    turn(query, out, steps.Angles(*at), block * rows, query_heads)
                else:
                    turn(key, key_out, steps.Angles(*at), (block - query_blocks) * rows, key_heads)
            else:
                turn(query, out, steps.Angles(*at), block * rows, query_heads)

    return apply_rotary


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
    source = RotarySource.of((*read, *written), cos_sin_cache, sin_cache, positions, has_key, flags[0])
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
    rot = check_heads(query, cos_sin_cache, key, positions, interleaved, seqlen_offset, sin_cache)
    check.flag("conjugate", conjugate)
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
    rot = check_heads(query, cos_sin_cache, key, positions, interleaved, seqlen_offset, sin_cache)
    check.flag("conjugate", conjugate)
    check_outs(query, key, out, key_out)
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
