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
    cos_sin_cache, sin_cache = (x.detach() if isinstance(x, Tensor) else x for x in (cos_sin_cache, sin_cache))
    # What is no tensor is for the op's checks to refuse.
    outs = [x.new_empty(x.shape) if isinstance(x, Tensor) else x for x in (query, key) if x is not None]
    written = dict(zip(("out", "key_out"), outs))
    tk_quant.apply_rotary(query, cos_sin_cache, key, *options, sin_cache=sin_cache, **written)
    return outs


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
