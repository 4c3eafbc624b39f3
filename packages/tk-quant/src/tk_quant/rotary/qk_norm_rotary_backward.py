"""qk_norm_rotary_backward: gradients of `qk_norm_rotary` with respect to queries, keys and the weights of their norms.

    g = the gradient turned back, rounded to the dtype (apply_rotary.py)
    x_grad, weight_grad = norm_backward of g (norm/backward.py)

A launch for queries and one for keys, each followed by that which sums its parts of the weight's gradient. Rows, their
ranges and the threads that hold them are those of norm/backward.py, so that sums are in the same order. In each step
the gradient's rows are turned back by threads that hold pairs, as in apply_rotary.py, and pass through shared memory to
the threads that hold their lanes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_quant.norm.arguments import NormOptions, rows_of_weight
from tk_quant.norm.backward import sum_parts_kernel
from tk_quant.norm.tile import blocks_per_sm, lanes_of, num_parts, piece_tile
from tk_quant.rotary.arguments import PASS_CONFIGS, RotarySource, check_heads
from tk_quant.rotary.qk_norm_rotary import check_norms


@kernel(pass_configs=PASS_CONFIGS)
def _qk_norm_rotary_backward_kernel(rot: int, head_dim: int, of: RotarySource, options: NormOptions, arch: Arch) -> Any:
    """Build the kernel for queries, or for keys, of which `rot` channels turn."""
    import tilelang.language as T

    from tk_quant.cast.tile import layout_of_tile
    from tk_quant.norm import steps as norm
    from tk_quant.rotary import steps
    from tk_quant.rotary.steps import strided

    dtype, config = T.dtype(of.dtype), piece_tile(head_dim, of.dtype)
    _, lanes, pieces = lanes_of(head_dim, of.dtype)
    rows, width = config.blocks_down, config.channels
    pairs = steps.pairs_of(rot, of, config.threads, rows)
    tokens, cache_shape = steps.shapes(rot, of)
    num_heads, num_tokens = T.dynamic("num_heads"), steps.num_tokens(tokens)
    shape, parts = (*tokens, num_heads, head_dim), T.dynamic("num_parts")

    @T.macro
    def turn_back(out_grad: T.Buffer, turned_back: T.Buffer, angles: steps.Angles, row_at: steps.RowAt) -> None:
        """turned_back (rows, head_dim) = the rows of out_grad turned back; of what is no row, anything."""
        before, turned = T.alloc_fragment(pairs.tile, dtype), T.alloc_fragment(pairs.tile, dtype)
        cos = T.alloc_fragment((rows, pairs.lanes, pairs.vec), "float32")
        sin = T.alloc_fragment((rows, pairs.lanes, pairs.vec), "float32")
        position = T.alloc_fragment((rows, pairs.lanes), "int32")
        T.annotate_layout({each: pairs.layout(each.shape) for each in (before, turned, cos, sin, position)})
        steps.load_pairs(out_grad, before, row_at, pairs)
        steps.load_positions(angles, position, row_at, of)
        steps.load_angles(angles, position, cos, sin, row_at, pairs, of)
        steps.turn(before, turned, position, cos, sin, angles.direction, pairs)
        steps.store_pairs(turned, turned_back, steps.rows_of_tile(), pairs)
        shape = pairs.shape_of_rest(head_dim - rot)
        steps.copy_rest(out_grad, row_at, turned_back, steps.rows_of_tile(), rot, head_dim - rot, shape)

    @T.prim_func
    def qk_norm_rotary_backward(
        out_grad: strided("out_grad", shape, of.dtype),
        x: strided("x", shape, of.dtype),
        weight: norm.weight_type(head_dim, options),
        rstd: T.Tensor((num_tokens, num_heads), "float32"),
        x_grad: strided("x_grad", shape, of.dtype),
        weight_parts: T.Tensor((T.dynamic("num_weights"), parts, head_dim), "float32"),
        cos_cache: strided("cos", cache_shape, of.cache_dtype),
        sin_cache: strided("sin", cache_shape, of.cache_dtype),
        positions: strided("position", tokens, of.position_dtype or torch.int32),
        seqlen_offset: T.int64,
        blocks: T.int32,
        weight_offset: T.float32,
    ) -> None:
        num_groups = num_heads if options.has_rows_of_weight else 1
        rows_of_group = num_tokens if options.has_rows_of_weight else num_tokens * num_heads
        with T.Kernel(num_groups * blocks, threads=config.threads) as block:
            # Narrower accesses take more registers, and nvcc must not spill any.
            if options.alignment == 16:
                # For sm_100 nvcc takes a few registers more than for sm_90, as if weights were float32.
                T.annotate_min_blocks_per_sm(
                    blocks_per_sm(head_dim, of.dtype, options.weight_dtype if arch.sm < 100 else torch.float32)
                )
            strides = (*cos_cache.strides[:-1], *(sin_cache.strides[:-1] if of.has_sin_cache else ()))
            steps.assume_alignment(strides, of.cache_alignment // of.cache_dtype.itemsize)
            steps.assume_alignment(out_grad.strides[:-1], of.alignment // of.dtype.itemsize)
            at = (cos_cache, sin_cache if of.has_sin_cache else cos_cache, positions, seqlen_offset, T.float32(-1))
            group, part = T.alloc_var("int32"), T.alloc_var("int32")
            group = T.truncdiv(block, blocks)
            part = T.truncmod(block, blocks)
            ranges = norm.RowRanges(part * rows, blocks * rows, rows_of_group, num_heads)
            xs, grads = T.alloc_fragment(config.tile, dtype), T.alloc_fragment(config.tile, dtype)
            weights = T.alloc_fragment(config.tile, T.dtype(options.loaded_weight))
            weight_sums = T.alloc_fragment((pieces, rows, lanes, config.vec), "float32")
            partials = T.alloc_fragment((config.threads,), "float32")
            rstds, sums = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            means = T.alloc_fragment((rows,), "float32")
            T.annotate_layout({each: layout_of_tile(config) for each in (xs, grads, weights)})
            T.annotate_layout({weight_sums: norm.layout_of_sums(config, pieces)})
            turned_back = T.alloc_shared((rows, head_dim), dtype)
            weight_at, factors = lambda i: (0, group, True), norm.Factors(rstds, weights, T.float32(1), weight_offset)
            places = steps.Places.of(rows, tokens)
            T.clear(weight_sums)
            for step in T.serial(T.ceildiv(rows_of_group, blocks * rows)):
                token_at = norm.rows_of_step(ranges, step, group, options)
                row_at = places.rows(token_at)
                in_tile = steps.rows_of_tile(token_at)
                steps.set_places(places, token_at, tokens)
                for i in T.Parallel(rows):
                    token, head, is_row = token_at(i)
                    rstds[i] = T.if_then_else(is_row, rstd[token, head], T.float32(0))
                if pieces == 1:
                    norm.load_rows(x, xs, row_at, options)
                turn_back(out_grad, turned_back, steps.Angles(*at), row_at)
                T.clear(partials)
                for piece in T.unroll(pieces):
                    if pieces > 1:
                        norm.load_rows(x, xs, row_at, options, piece * width)
                    norm.load_rows(turned_back, grads, in_tile, options, piece * width)
                    if options.has_weight:
                        norm.load_weights(weight, weights, weight_at, options, piece * width)
                    norm.add_products(xs, grads, factors, partials, options, config)
                norm.sums_of_rows(partials, sums, lanes)
                for i in T.Parallel(rows):
                    means[i] = sums[i] / T.float32(head_dim)
                for piece in T.unroll(pieces):
                    if pieces > 1:
                        norm.load_rows(x, xs, row_at, options, piece * width)
                        norm.load_rows(turned_back, grads, in_tile, options, piece * width)
                        if options.has_weight:
                            norm.load_weights(weight, weights, weight_at, options, piece * width)
                    norm.gradients(xs, grads, grads, factors, means, weight_sums, piece, options, config)
                    norm.store_rows(xs, x_grad, row_at, options, piece * width)
            if options.has_weight:
                norm.store_parts(weight_sums, weight_parts, group, part)

    return qk_norm_rotary_backward


class _Side(NamedTuple):
    """The arguments for queries, or for keys."""

    x: Tensor | None
    out_grad: Tensor | None
    rstd: Tensor | None
    weight: Tensor | None
    weight_grad: Tensor | None


def _check_side(name: str, name_of_grad: str, side: _Side) -> None:
    x, out_grad, rstd, weight, weight_grad = side
    if x is None:
        check.require(out_grad is None, name_of_grad, "None without key", type(out_grad).__name__)
        check.require(rstd is None, f"{name}_rstd", "None without key", type(rstd).__name__)
    else:
        check.tensor(name_of_grad, out_grad, (x.dtype,), tuple(x.shape), layout="rows", device=x.device)
        check.tensor(f"{name}_rstd", rstd, (torch.float32,), tuple(x.shape[:-1]), device=x.device)
    if weight_grad is not None:
        check.require(weight is not None, f"{name}_weight_grad", f"None without {name}_weight", "a tensor")
        dtypes = (torch.bfloat16, torch.float32)
        check.tensor(f"{name}_weight_grad", weight_grad, dtypes, tuple(weight.shape), device=x.device)


def _launch(
    side: _Side,
    x_grad: Tensor,
    weight_grad: Tensor | None,
    angles: tuple[Tensor, Tensor | None, Tensor | None, int],
    rot: int,
    interleaved: bool,
    weight_offset: float,
) -> None:
    x, out_grad, rstd, weight, given = side
    arch, parts, (num_heads, head_dim) = get_arch(x.device), None, x.shape[-2:]
    rows = (x, out_grad, x_grad)
    source = RotarySource.of(rows, angles[0], angles[1], angles[2], False, interleaved)
    options = NormOptions.of(x, weight, rows, False)
    num_weights = num_heads if options.has_rows_of_weight else 1
    blocks = num_parts(x.numel() // (head_dim * max(num_weights, 1)), head_dim, x.dtype)
    if weight is not None:
        parts = x.new_empty((num_weights, blocks, head_dim), dtype=torch.float32)
    if x.numel():
        _qk_norm_rotary_backward_kernel(rot, head_dim, source, options, arch)(
            *(out_grad, x, rows_of_weight(weight), rstd.view(-1, num_heads), x_grad, parts),
            *(*angles, blocks, weight_offset),
        )
    if x.numel() and weight_grad is not None:
        sum_parts_kernel(head_dim, weight_grad.dtype, given is not None, arch)(parts, rows_of_weight(weight_grad))
    elif weight_grad is not None and given is None:
        weight_grad.zero_()


@op(
    writes=("query_weight_grad", "key_weight_grad"),
    aligned=("query_weight", "key_weight", "query_weight_grad", "key_weight_grad"),
)
def qk_norm_rotary_backward(
    out_grad: Tensor,
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    query_rstd: Tensor,
    key_out_grad: Tensor | None = None,
    key: Tensor | None = None,
    key_rstd: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offset: int = 0,
    *,
    weight_offset: float = 0.0,
    sin_cache: Tensor | None = None,
    query_weight_grad: Tensor | None = None,
    key_weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `qk_norm_rotary` with respect to query, key and the weights of their norms.

    Every bit is that of `apply_rotary` with `conjugate` on the gradients, rounded to their dtype, and of
    `norm_backward` on its results, with each head a row.

    Args:
        out_grad: Gradient of the forward's result for query, like query.
        query: What the forward read, not what it wrote: (num_tokens, heads, D) or (batch, num_tokens, heads, D).
        cos_sin_cache: The forward's.
        query_weight: The forward's; None for none.
        key_weight: The forward's; None for none.
        query_rstd: The forward's rstd of query, float32 (…, heads), contiguous.
        key_out_grad: Gradient of the forward's result for key, like key; None without key.
        key: What the forward read.
        key_rstd: The forward's rstd of key; None without key.
        positions: The forward's.
        interleaved: The forward's.
        seqlen_offset: The forward's.
        weight_offset: The forward's.
        sin_cache: The forward's.
        query_weight_grad: bfloat16 or float32, query_weight's shape, contiguous, to which the gradient is added in
            place.
        key_weight_grad: As query_weight_grad, for key_weight.

    Returns:
        `(query_grad, key_grad, query_weight_grad, key_weight_grad)`: those of query and key like these, contiguous;
        those of weights the given buffers, or new tensors of the weights' dtypes. None for what there is not.

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    rot = check_heads(query, cos_sin_cache, key, positions, interleaved, seqlen_offset, sin_cache)
    check_norms(query, key, query_weight, key_weight, weight_offset)
    queries = _Side(query, out_grad, query_rstd, query_weight, query_weight_grad)
    keys = _Side(key, key_out_grad, key_rstd, key_weight, key_weight_grad)
    _check_side("query", "out_grad", queries)
    _check_side("key", "key_out_grad", keys)
    x_grads = [None if side.x is None else new(side.x.new_empty, side.x.shape) for side in (queries, keys)]
    weight_grads = [
        new(side.weight.new_empty, side.weight.shape) if given is None and side.weight is not None else given
        for side, given in ((queries, query_weight_grad), (keys, key_weight_grad))
    ]
    if launching(x_grads, weight_grads):
        angles = (cos_sin_cache, sin_cache, positions, seqlen_offset)
        for side, x_grad, weight_grad in zip((queries, keys), x_grads, weight_grads):
            if x_grad is not None:
                _launch(side, x_grad, weight_grad, angles, rot, interleaved, float(weight_offset))
    return *x_grads, *weight_grads
