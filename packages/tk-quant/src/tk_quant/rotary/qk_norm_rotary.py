"""qk_norm_rotary: RMSNorm of each head of queries and keys, then RoPE, in one pass.

    h = norm_forward of a head, rounded to the dtype (norm/forward.py);  out = apply_rotary of h (apply_rotary.py)

A row is one head of one token. Its lanes are the norm's (norm/tile.py), so squares are summed in the same order. Where
all channels turn and fill a power of two of lanes, a thread has the lanes that are half a row apart: their sums are the
first to be added, and both channels of each pair are in one thread:

    bfloat16, 128 channels   row 0   [ lane 0: t0 | 1: t1 | 2: t2 | 3: t3 | 4: t0 | 5: t1 | 6: t2 | 7: t3 ]
                                 1   [         t4 |   …

Otherwise a thread has one lane, and the normalized rows go through shared memory to threads that hold pairs as in
apply_rotary. Thread blocks for queries come first, then those for keys.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_quant.norm.arguments import NormOptions, check_factors, check_hidden, check_weight, rows_of_weight
from tk_quant.norm.tile import WARP, lanes_of, row_tile
from tk_quant.rotary.arguments import PASS_CONFIGS, RotarySource, check_heads, check_outs


class _Heads(NamedTuple):
    """Queries or keys, as their thread blocks see them."""

    x: Any
    weight: Any
    out: Any
    rstd: Any
    num_heads: Any
    first_row: Any
    """Of the thread block."""


@kernel(pass_configs=PASS_CONFIGS)
def _qk_norm_rotary_kernel(
    rot: int, head_dim: int, of: RotarySource, options: tuple[NormOptions, ...], with_rstd: bool, arch: Arch
) -> Any:
    """Build the kernel for heads of which `rot` channels turn; `options` of queries, and of keys if there are any."""
    import tilelang.language as T

    from tk_quant.norm import steps as norm
    from tk_quant.rotary import steps
    from tk_quant.rotary.steps import strided

    dtype, config = T.dtype(of.dtype), row_tile(head_dim, of.dtype)
    vec, num_lanes, pieces = lanes_of(head_dim, of.dtype)
    has_both = rot == head_dim == vec * num_lanes and 2 <= num_lanes <= WARP
    if has_both:
        config = replace(config, blocks_down=2 * config.blocks_down)
    rows = config.blocks_down
    row_threads = config.threads // rows
    pairs = steps.pairs_of(rot, of, config.threads, rows, vec if has_both else 0)
    tokens, cache_shape = steps.shapes(rot, of)
    query_heads, key_heads = T.dynamic("query_heads"), T.dynamic("key_heads")
    query_shape, key_shape = (*tokens, query_heads, head_dim), (*tokens, key_heads, head_dim)

    def place(row: Any, lane: Any, index: Any, size: int) -> tuple[Any, Any]:
        return row * row_threads + lane % row_threads, lane // row_threads * size + index

    layout_of_rows = T.Fragment(config.tile, lambda i, t, lane, j: place(i, lane, j, vec))
    layout_of_lanes = T.Fragment((rows, num_lanes), lambda i, lane: place(i, lane, 0, 1))

    @T.macro
    def norm_and_turn(
        heads: _Heads, angles: steps.Angles, eps: T.float32, weight_offset: T.float32, has: NormOptions
    ) -> None:
        token_at, places = steps.rows_from(heads.first_row, heads.num_heads, tokens), steps.Places.of(rows, tokens)
        row_at = places.rows(token_at)
        tile, turned = T.alloc_fragment(config.tile, dtype), T.alloc_fragment(pairs.tile, dtype)
        # In float32, as each conversion takes instructions.
        values, normed = T.alloc_fragment(config.tile, "float32"), T.alloc_fragment(config.tile, "float32")
        weights = T.alloc_fragment(config.tile, T.dtype(has.loaded_weight))
        partials = T.alloc_fragment((rows, num_lanes), "float32")
        sums, rstds = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
        cos = T.alloc_fragment((rows, pairs.lanes, pairs.vec), "float32")
        sin = T.alloc_fragment((rows, pairs.lanes, pairs.vec), "float32")
        position = T.alloc_fragment((rows, pairs.lanes), "int32")
        T.annotate_layout(dict.fromkeys((tile, values, normed, weights), layout_of_rows))
        T.annotate_layout({partials: layout_of_lanes})
        T.annotate_layout({each: pairs.layout(each.shape) for each in (turned, cos, sin, position)})
        steps.set_places(places, token_at, tokens)
        norm.load_rows(heads.x, tile, row_at, has)
        steps.load_positions(angles, position, row_at, of)
        if has.has_weight:
            norm.load_weights(heads.weight, weights, row_at, has)
        T.copy(tile, values)
        T.clear(partials)
        for i, lane in T.Parallel(rows, num_lanes):
            for piece in T.unroll(pieces):
                for j in T.unroll(vec):
                    value = values[i, 0, piece * num_lanes + lane, j]
                    partials[i, lane] = T.fma(value, value, partials[i, lane])
        norm.sums_of_rows(partials, sums, num_lanes)
        norm.rstd_of_sums(sums, rstds, eps, head_dim)
        if with_rstd:
            for i in T.Parallel(rows):
                if token_at(i)[2]:
                    heads.rstd[heads.first_row + i] = rstds[i]
        norm.normalize(values, weights, rstds, normed, T.float32(1), weight_offset, has)
        # Not before, as registers have no room for them.
        steps.load_angles(angles, position, cos, sin, row_at, pairs, of)
        if has_both:
            steps.turn(T.reshape(normed, pairs.tile), turned, position, cos, sin, angles.direction, pairs)
            steps.store_pairs(turned, heads.out, row_at, pairs)
        else:
            exchanged, before = T.alloc_shared((rows, head_dim), dtype), T.alloc_fragment(pairs.tile, dtype)
            T.annotate_layout({before: pairs.layout(before.shape)})
            norm.store_rows(normed, exchanged, steps.rows_of_tile(), has)
            steps.load_pairs(exchanged, before, steps.rows_of_tile(), pairs)
            steps.turn(before, turned, position, cos, sin, angles.direction, pairs)
            steps.store_pairs(turned, heads.out, row_at, pairs)
            shape = pairs.shape_of_rest(head_dim - rot)
            steps.copy_rest(exchanged, steps.rows_of_tile(), heads.out, row_at, rot, head_dim - rot, shape)

    @T.prim_func
    def qk_norm_rotary(
        query: strided("query", query_shape, of.dtype),
        key: strided("key", key_shape, of.dtype),
        query_weight: norm.weight_type(head_dim, options[0], "num_query_weights"),
        key_weight: norm.weight_type(head_dim, options[-1], "num_key_weights"),
        out: strided("out", query_shape, of.dtype),
        key_out: strided("key_out", key_shape, of.dtype),
        query_rstd: T.Tensor((steps.num_tokens(tokens) * query_heads,), "float32"),
        key_rstd: T.Tensor((steps.num_tokens(tokens) * key_heads,), "float32"),
        cos_cache: strided("cos", cache_shape, of.cache_dtype),
        sin_cache: strided("sin", cache_shape, of.cache_dtype),
        positions: strided("position", tokens, of.position_dtype or torch.int32),
        seqlen_offset: T.int64,
        eps: T.float32,
        weight_offset: T.float32,
    ) -> None:
        query_blocks = T.ceildiv(steps.num_tokens(tokens) * query_heads, rows)
        key_blocks = T.ceildiv(steps.num_tokens(tokens) * key_heads, rows) if of.has_key else 0
        with T.Kernel(query_blocks + key_blocks, threads=config.threads) as block:
            strides = (*out.strides[:-1], *(key_out.strides[:-1] if of.has_key else ()))
            steps.assume_alignment(strides, of.alignment // of.dtype.itemsize)
            strides = (*cos_cache.strides[:-1], *(sin_cache.strides[:-1] if of.has_sin_cache else ()))
            steps.assume_alignment(strides, of.cache_alignment // of.cache_dtype.itemsize)
            at = (cos_cache, sin_cache if of.has_sin_cache else cos_cache, positions, seqlen_offset, T.float32(1))
            angles = steps.Angles(*at)
            queries = _Heads(query, query_weight, out, query_rstd, query_heads, block * rows)
            if of.has_key:
                keys = _Heads(key, key_weight, key_out, key_rstd, key_heads, (block - query_blocks) * rows)
                if block < query_blocks:
                    norm_and_turn(queries, angles, eps, weight_offset, options[0])
                else:
                    norm_and_turn(keys, angles, eps, weight_offset, options[-1])
            else:
                norm_and_turn(queries, angles, eps, weight_offset, options[0])

    return qk_norm_rotary


def check_norms(
    query: Tensor, key: Tensor | None, query_weight: Tensor | None, key_weight: Tensor | None, weight_offset: float
) -> None:
    """Check what the norm takes of heads that RoPE takes."""
    check_hidden("query", query.shape[-1], 8)
    check_weight(query_weight, query, "query_weight")
    if key is None:
        check.require(key_weight is None, "key_weight", "None without key", type(key_weight).__name__)
    else:
        check_weight(key_weight, key, "key_weight")
    check_factors(1.0, weight_offset)


def _check_and_launch(
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    seqlen_offset: int,
    *,
    weight_offset: float,
    round_before_weight: bool,
    sin_cache: Tensor | None,
    out: Tensor,
    key_out: Tensor | None,
    with_rstd: bool,
) -> tuple[Tensor, Tensor | None] | None:
    rot = check_heads(query, cos_sin_cache, key, positions, interleaved, seqlen_offset, sin_cache)
    check_norms(query, key, query_weight, key_weight, weight_offset)
    check.number("eps", eps, at_least=0)
    check.flag("round_before_weight", round_before_weight)
    check.flag("with_rstd", with_rstd)
    check_outs(query, key, out, key_out)
    heads = tuple(x for x in (query, key) if x is not None)
    rstds: list[Tensor | None] = [None, None]
    if with_rstd:
        rstds[: len(heads)] = [new(x.new_empty, x.shape[:-1], dtype=torch.float32) for x in heads]
    if launching(out, key_out, rstds):
        rows = (*heads, out, key_out)
        source = RotarySource.of(rows, cos_sin_cache, sin_cache, positions, key is not None, interleaved)
        weights = (query_weight, key_weight)
        options = tuple(
            NormOptions.of(x, weight, rows, False, round_before_weight) for x, weight in zip(heads, weights)
        )
        _qk_norm_rotary_kernel(rot, query.shape[-1], source, options, with_rstd, get_arch(query.device))(
            *(query, key, *map(rows_of_weight, weights), out, key_out),
            *(None if x is None else x.view(-1) for x in rstds),
            *(cos_sin_cache, sin_cache, positions, seqlen_offset, float(eps), float(weight_offset)),
        )
    return tuple(rstds) if with_rstd else None


@op(writes=("query", "key"), aligned=("query_weight", "key_weight"), reference="qk_norm_rotary")
def _qk_norm_rotary_in_place(
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    seqlen_offset: int,
    *,
    weight_offset: float,
    round_before_weight: bool,
    sin_cache: Tensor | None,
    with_rstd: bool,
) -> tuple[Tensor, Tensor | None] | None:
    return _check_and_launch(
        *(query, cos_sin_cache, query_weight, key_weight, eps, key, positions, interleaved, seqlen_offset),
        weight_offset=weight_offset,
        round_before_weight=round_before_weight,
        sin_cache=sin_cache,
        out=query,
        key_out=key,
        with_rstd=with_rstd,
    )


@op(writes=("out", "key_out"), aligned=("query_weight", "key_weight"), reference="qk_norm_rotary")
def _qk_norm_rotary_to_out(
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    seqlen_offset: int,
    *,
    weight_offset: float,
    round_before_weight: bool,
    sin_cache: Tensor | None,
    out: Tensor,
    key_out: Tensor | None,
    with_rstd: bool,
) -> tuple[Tensor, Tensor | None] | None:
    return _check_and_launch(
        *(query, cos_sin_cache, query_weight, key_weight, eps, key, positions, interleaved, seqlen_offset),
        weight_offset=weight_offset,
        round_before_weight=round_before_weight,
        sin_cache=sin_cache,
        out=out,
        key_out=key_out,
        with_rstd=with_rstd,
    )


def qk_norm_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offset: int = 0,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    sin_cache: Tensor | None = None,
    out: Tensor | None = None,
    key_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """RMSNorm of each head of query, and of key, then rotary position embedding, in one launch.

    Every bit is that of `norm_forward` over the channels of each head, rounded to the dtype, and of `apply_rotary`
    on its result:

        rstd = 1 / sqrt(Σ h² / D + eps);  n = (h * rstd) * (weight + weight_offset), rounded to h's dtype
        of the first rot channels of n, pairs (f, s) turn:  f' = fma(f, cos, -(s * sin));  s' = fma(f, sin, s * cos)

    A token whose position is outside of the cache gets zeros for the channels that turn (`TK_DEBUG=1` raises
    ValueError). Sources: arXiv 1910.07467 and 2104.09864.

    Args:
        query: bfloat16 or float32 (num_tokens, heads, D) or (batch, num_tokens, heads, D), any strides but 1 in the
            last dimension; D a multiple of 8. It is written in place, unless `out` is given.
        cos_sin_cache: cos and sin, float32 or bfloat16 (L, rot) or (batch, L, rot), as in `apply_rotary`.
        query_weight: (D), or (heads, D) with one weight for each head, contiguous, of query's dtype or float32; None
            for 1.
        key_weight: As query_weight, for key; None without key.
        eps: At least 0.
        key: As query, with heads of its own.
        positions: int32 or int64 (num_tokens) or (batch, num_tokens), sequences at any stride; None for 0, 1, 2, …
        interleaved: Whether the channels of a pair are neighbours.
        seqlen_offset: Is added to all positions, in int64.
        weight_offset: Added to the weights, in float32, unless it is 0; Gemma's norms have 1.
        round_before_weight: Round h * rstd to the dtype before it is multiplied by the weight, as most of Hugging
            Face's models do.
        sin_cache: sin alone, like cos_sin_cache, which has cos alone then; both (…, L, rot / 2).
        out, key_out: Tensors like query and key to write to, which overlap no argument; query and key stay as they are.
            Both or neither if there is a key.
        with_rstd: Return rstd, as `qk_norm_rotary_backward` needs it.

    Returns:
        With with_rstd `(query rstd, key rstd)`, float32 (…, heads), that of the key None without key; else None.

    Raises:
        TypeError: An argument is not a tensor, a number or a bool as described, or has another dtype.
        ValueError: Any other argument is not as described, is on another device, or shares memory with one that is
            written.
    """
    given = (query, cos_sin_cache, query_weight, key_weight, eps, key, positions, interleaved, seqlen_offset)
    options = {
        "weight_offset": weight_offset,
        "round_before_weight": round_before_weight,
        "sin_cache": sin_cache,
        "with_rstd": with_rstd,
    }
    if out is None and key_out is None:
        return _qk_norm_rotary_in_place(*given, **options)
    return _qk_norm_rotary_to_out(*given, **options, out=out, key_out=key_out)
