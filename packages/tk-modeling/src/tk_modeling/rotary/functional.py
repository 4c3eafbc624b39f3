"""Differentiable rotary position embedding."""

from torch import Tensor

import tk_quant
from tk_modeling.function import Context, Function, Gradients


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`tk_quant.apply_rotary` to new, contiguous tensors; differentiable by query and key, not by cos and sin.

    Returns:
        query turned, or with a key `(query, key)` turned, like these.
    """
    return _ApplyRotary.call(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset, sin_cache)


def _turned(
    query: Tensor, cos_sin_cache: Tensor, key: Tensor | None, *options: object, sin_cache: Tensor | None
) -> list[Tensor]:
    """query turned, and key, if there is one, by one launch."""
    cos_sin_cache, sin_cache = _detached(cos_sin_cache, sin_cache)
    outs = _like(query, key)
    tk_quant.apply_rotary(query, cos_sin_cache, key, *options, sin_cache=sin_cache, **outs)
    return list(outs.values())


# What is no tensor is for the ops' checks to refuse.


def _detached(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in tensors)


def _like(query: Tensor, key: Tensor | None) -> dict[str, Tensor]:
    """Arguments out, and key_out if there is a key: new tensors."""
    outs = (x.new_empty(x.shape) if isinstance(x, Tensor) else x for x in (query, key) if x is not None)
    return dict(zip(("out", "key_out"), outs))


class _ApplyRotary(Function):
    saves = ("cos_sin_cache", "positions", "interleaved", "conjugate", "seqlen_offset", "sin_cache")

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        conjugate: bool,
        seqlen_offset: int,
        sin_cache: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        options = positions, interleaved, conjugate, seqlen_offset
        outs = _turned(query, cos_sin_cache, key, *options, sin_cache=sin_cache)
        return outs[0] if key is None else tuple(outs)

    @staticmethod
    def backward(ctx: Context, d_query: Tensor | None, d_key: Tensor | None = None) -> Gradients:
        cos_sin_cache, positions, interleaved, conjugate, seqlen_offset, sin_cache = ctx.saved
        grads = [d if needed else None for d, needed in zip((d_query, d_key), ctx.needs_input_grad)]
        given = [d for d in grads if d is not None]
        options = positions, interleaved, not conjugate, seqlen_offset
        found = iter(_turned(given[0], cos_sin_cache, *(given[1:] or [None]), *options, sin_cache=sin_cache))
        return tuple(None if d is None else next(found) for d in grads)


def qk_norm_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float = 1e-6,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offset: int = 0,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    sin_cache: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tk_quant.qk_norm_rotary` to new, contiguous tensors; differentiable by all but cos and sin.

    Gradients of weights are computed in float32. If a weight has a float32 `main_grad`, its gradient is added there in
    place and `.grad` stays None.

    Returns:
        query normalized and turned, or with a key `(query, key)` normalized and turned, like these.
    """
    options = eps, positions, interleaved, seqlen_offset, weight_offset, round_before_weight, sin_cache
    found = _QkNormRotary.call(query, key, query_weight, key_weight, cos_sin_cache, *options)
    return found[0] if key is None else found[:2]


class _QkNormRotary(Function):
    parameters = ("query_weight", "key_weight")
    saves = (
        *("query", "query_weight", "query_rstd", "key", "key_weight", "key_rstd"),
        *("cos_sin_cache", "positions", "interleaved", "seqlen_offset", "weight_offset", "sin_cache"),
    )
    outputs = ("out", "key_out", "query_rstd", "key_rstd")

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos_sin_cache: Tensor,
        eps: float,
        positions: Tensor | None,
        interleaved: bool,
        seqlen_offset: int,
        weight_offset: float,
        round_before_weight: bool,
        sin_cache: Tensor | None,
    ) -> tuple[Tensor, ...]:
        cos_sin_cache, sin_cache = _detached(cos_sin_cache, sin_cache)
        outs = _like(query, key)
        rstds = tk_quant.qk_norm_rotary(
            *(query, cos_sin_cache, query_weight, key_weight, eps, key, positions, interleaved, seqlen_offset),
            weight_offset=weight_offset,
            round_before_weight=round_before_weight,
            sin_cache=sin_cache,
            with_rstd=True,
            **outs,
        )
        nothing = query.new_empty(0), query.new_empty(0)
        return outs["out"], outs.get("key_out", nothing[0]), rstds[0], nothing[1] if key is None else rstds[1]

    @staticmethod
    def backward(ctx: Context, d_out: Tensor | None, d_key_out: Tensor | None) -> Gradients:
        query, query_weight, query_rstd, key, key_weight, key_rstd, *angles, weight_offset, sin_cache = ctx.saved
        main_grad, needed = ctx.main_grads.get, ctx.needs_input_grad
        queries = (d_out, query, query_weight, query_rstd, main_grad("query_weight"))
        keys = (d_key_out, key, key_weight, key_rstd, main_grad("key_weight"))
        sides = [side for i, side in enumerate((queries, keys)) if side[0] is not None and (needed[i] or needed[i + 2])]
        if not sides:
            return None, None, None, None
        (d, x, weight, rstd, into), (d_2, x_2, weight_2, rstd_2, into_2) = (*sides, (None,) * 5)[:2]
        found = tk_quant.qk_norm_rotary_backward(
            *(d, x, angles[0], weight, weight_2, rstd, d_2, x_2, rstd_2, *angles[1:]),
            weight_offset=weight_offset,
            sin_cache=sin_cache,
            query_weight_grad=into,
            key_weight_grad=into_2,
        )
        # Keys alone take the place of queries.
        return found if sides[0] is queries else (None, found[0], None, found[2])
