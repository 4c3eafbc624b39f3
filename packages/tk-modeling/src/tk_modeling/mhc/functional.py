"""mHC around a sublayer as functions of the residual: streams from an embedding, mhc_pre, mhc_head.

mhc_post, the other half of mhc_pre, is an op of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import tk_mhc
from tk_core import check
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16, needs_gradients
from tk_modeling.mhc.ops import expand_to_mhc, split_mixes_bwd


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """The first residual: mhc_mult copies of each token's embedding as its streams.

    x bfloat16 (..., H), contiguous; H a multiple of 64, 64 to 8192; mhc_mult 2, 4 or 8. Returns bfloat16
    (..., mhc_mult, H). Raises TypeError or ValueError that names the argument.
    """
    return expand_to_mhc(x, mhc_mult)


class MixParameters(NamedTuple):
    """What the mixes are computed by from the residual."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor | None


class PreSettings(NamedTuple):
    """Settings of mhc_pre."""

    norm_eps: float
    post_mult_value: float
    pre_eps: float
    sinkhorn_eps: float
    sinkhorn_repeat: int
    n_splits: int | None
    shifted: bool
    post_eps: float = 0.0


class PreResult(NamedTuple):
    """Results of mhc_pre."""

    layer_input: Tensor
    post_mix: Tensor
    comb_mix: Tensor | None
    pre_mix: Tensor | None
    """The residual's own pre; None without gradients if not shifted, where it is not written."""
    residual: Tensor
    """The residual, for mhc_post and nothing else."""


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int | None = None,
    shifted: bool = False,
    pre_mix: Tensor | None = None,
    return_residual: bool = False,
    post_eps: float = 0.0,
) -> tuple[Any, ...]:
    """Compute a sublayer's input from the residual, and the mixes that mhc_post takes after the sublayer.

    mhc_pre_norm_fn, mhc_pre_split_mixes, sinkhorn_normalize and mhc_pre_apply_mix of tk_mhc, one after the other;
    without gradients tk_mhc.mhc_pre_big_fuse, which has the same bits. Source: arXiv 2512.24880. Gradients of fn,
    norm_weight, scale and base are added to a parameter's float32 `main_grad`, if it has one. Under autocast to
    bfloat16 a float32 residual is cast first.

    Args:
        residual: bfloat16 (..., m, H), contiguous; H a multiple of 64, 64 to 8192.
        fn: float32 (m·(m+2), m·H), or (2m, m·H) if streams are not mixed (HY-V4): then there is no comb; contiguous.
        scale: float32 (3): of pre, post and comb; (2) without comb.
        base: float32 (m·(m+2)): of pre, post and comb; (2m) without comb.
        norm_weight: float32 (m·H), or None for ones.
        norm_eps: added to the mean of squares.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        post_mult_value: factor of post.
        pre_eps: added to pre.
        sinkhorn_eps: added to the softmax and to each sum of a row or column.
        sinkhorn_repeat: iterations, 1 to 1000.
        n_splits: splits of the projection's sum, see tk_mhc.mhc_pre_norm_fn.
        shifted: collapse the streams by `pre_mix`, and return this residual's own pre for the next sublayer.
        pre_mix: float32 (..., m, 1), with `shifted` only: next_pre_mix of the sublayer before; None: stream 0.
        return_residual: return the residual, too, to be given to mhc_post instead of the argument, and to nothing else:
            the backward adds in place to the gradient that mhc_post's backward made, which saves autograd a sum of two
            tensors of the residual's size.
        post_eps: added to post.

    Returns:
        layer_input: bfloat16 (..., H).
        (post_mix, comb_mix): float32 (..., m, 1) and (..., m, m), or None for comb_mix.
        next_pre_mix: float32 (..., m, 1), with `shifted` only.
        residual: with `return_residual` only.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, a number is out of range, or a main_grad does not fit its
            parameter.
    """
    check.flag("return_residual", return_residual)
    settings = PreSettings(
        norm_eps, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat, n_splits, shifted, post_eps
    )
    parameters = MixParameters(fn, scale, base, norm_weight)
    result = collapse_streams(residual, parameters, mhc_mult, settings, pre_mix)
    last = (result.pre_mix,) if shifted else ()
    if return_residual:
        last = (*last, result.residual)
    return result.layer_input, (result.post_mix, result.comb_mix), *last


def collapse_streams(
    residual: Tensor, parameters: MixParameters, mhc_mult: int, settings: PreSettings, pre_mix: Tensor | None
) -> PreResult:
    """mhc_pre with all of its results."""
    (residual,) = autocast_to_bf16(residual)
    _check_pre(residual, parameters, mhc_mult, settings, pre_mix)
    if needs_gradients(residual, *parameters, pre_mix):
        results = _MhcPre.call(residual, *parameters, pre_mix, settings)
        layer_input, post_mix, comb_mix, own_pre_mix, same_residual = results[:5]
        comb_mix = None if len(parameters.fn) == 2 * mhc_mult else comb_mix
        # The view requires gradients if any input does.
        residual = same_residual if residual.requires_grad else residual
        return PreResult(layer_input, post_mix, comb_mix, own_pre_mix, residual)
    post_mix, comb_mix, layer_input, *own_pre_mix = tk_mhc.mhc_pre_big_fuse(
        *(residual, parameters.fn, parameters.scale, parameters.base, settings.norm_eps, settings.pre_eps),
        *(settings.sinkhorn_eps, settings.post_mult_value, settings.sinkhorn_repeat, settings.n_splits),
        parameters.norm_weight,
        shifted=settings.shifted,
        pre_mix=pre_mix,
        mhc_post_eps=settings.post_eps,
    )
    return PreResult(layer_input, post_mix, comb_mix, own_pre_mix[0] if own_pre_mix else None, residual)


class _MhcPre(Function):
    """mhc_pre by the single ops."""

    parameters = ("fn", "scale", "base", "norm_weight")
    outputs = ("layer_input", "post", "comb", "pre", "same_residual", "mixes", "rstd", "logits")
    saves = ("residual", "fn", "scale", "base", "norm_weight", "pre_mix", "pre", "mixes", "rstd", "logits", "settings")

    @staticmethod
    def forward(
        residual: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor | None,
        pre_mix: Tensor | None,
        settings: PreSettings,
    ) -> tuple[Tensor, ...]:
        mixes, rstd = tk_mhc.mhc_pre_norm_fn(
            residual, fn, norm_weight, settings.norm_eps, n_splits=settings.n_splits, return_rstd=True
        )
        numbers = residual.shape[-2], settings.post_mult_value, settings.pre_eps
        pre, post, logits = tk_mhc.mhc_pre_split_mixes(mixes, scale, base, *numbers, mhc_post_eps=settings.post_eps)
        if logits is None:
            comb, logits = post.new_empty(0), post.new_empty(0)
        else:
            comb = tk_mhc.sinkhorn_normalize(logits, settings.sinkhorn_repeat, settings.sinkhorn_eps)
        if settings.shifted and pre_mix is None:
            layer_input = residual[..., 0, :].clone(memory_format=torch.contiguous_format)
        else:
            layer_input = tk_mhc.mhc_pre_apply_mix(residual, pre_mix if settings.shifted else pre)
        return layer_input, post, comb, pre, residual.view_as(residual), mixes, rstd, logits

    @staticmethod
    def backward(
        ctx: Context,
        d_layer_input: Tensor | None,
        d_post: Tensor | None,
        d_comb: Tensor | None,
        d_pre: Tensor | None,
        d_residual: Tensor | None,
    ) -> Gradients:
        residual, fn, scale, base, norm_weight, pre_mix, pre, mixes, rstd, logits, settings = ctx.saved
        mix = pre_mix if settings.shifted else pre
        d_residual, d_mix = _collapse_bwd(d_layer_input, residual, mix, d_residual)
        d_pre_mix = None
        if settings.shifted:
            d_pre_mix = d_mix
        elif d_mix is not None:
            d_pre = d_mix if d_pre is None else d_pre + d_mix
        d_logits = None
        if d_comb is not None and logits.numel():
            d_logits = tk_mhc.sinkhorn_normalize_bwd(d_comb, logits, settings.sinkhorn_repeat, settings.sinkhorn_eps)
        d_outputs = (d_pre, d_post, d_logits)
        d_mixes, d_scale, d_base = split_mixes_bwd(
            d_outputs, mixes, scale, base, residual.shape[-2], settings.post_mult_value
        )
        # The op adds to d_residual in place.
        d_residual, d_fn, d_norm_weight = tk_mhc.mhc_pre_norm_fn_bwd(
            d_mixes, residual, fn, norm_weight, mixes, rstd, d_residual=d_residual
        )
        return d_residual, d_fn, d_scale, d_base, d_norm_weight, d_pre_mix


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int | None = None,
) -> Tensor:
    """The last collapse of the streams: the input of a language model's head.

    mhc_pre_norm_fn, mhc_head_compute_mix and mhc_pre_apply_mix of tk_mhc, one after the other. Source: arXiv
    2512.24880. Gradients of fn, norm_weight, scale and base are added to a parameter's float32 `main_grad`, if it has
    one. Under autocast to bfloat16 a float32 residual is cast first.

    Args:
        residual: bfloat16 (..., m, H), contiguous; H a multiple of 64, 64 to 8192.
        fn: float32 (m, m·H), or (m·(m+2), m·H), of which the first m rows count; contiguous.
        scale: float32, of one element in one dimension or none.
        base: float32 (m).
        norm_weight: float32 (m·H), or None for ones.
        norm_eps: added to the mean of squares.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        pre_eps: added to the weights.
        n_splits: splits of the projection's sum, see tk_mhc.mhc_pre_norm_fn.

    Returns:
        bfloat16 (..., H).

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, a number is out of range, or a main_grad does not fit its
            parameter.
    """
    settings = HeadSettings(norm_eps, pre_eps, n_splits)
    (residual,) = autocast_to_bf16(residual)
    _check_head(residual, MixParameters(fn, scale, base, norm_weight), mhc_mult, settings)
    return _MhcHead.call(residual, fn, scale, base, norm_weight, settings)[0]


def _collapse_bwd(
    d_layer_input: Tensor | None, residual: Tensor, mix: Tensor | None, d_residual: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(d_residual, d_mix) of the collapse by mix, or to stream 0 where mix is None.

    A given d_residual is added to in place: mhc_post's backward made it, and nothing else uses it.
    """
    if d_layer_input is None:
        return d_residual, None
    if mix is not None:
        return tk_mhc.mhc_pre_apply_mix_bwd(d_layer_input, residual, mix, d_x=d_residual)
    d_residual = torch.zeros_like(residual) if d_residual is None else d_residual
    d_residual[..., 0, :] += d_layer_input
    return d_residual, None


class HeadSettings(NamedTuple):
    """Settings of mhc_head."""

    norm_eps: float
    pre_eps: float
    n_splits: int | None


class _MhcHead(Function):
    """mhc_head by the single ops, by the first rows of fn."""

    parameters = ("fn", "scale", "base", "norm_weight")
    outputs = ("y", "mixes", "rstd", "pre")
    saves = ("residual", "fn", "scale", "base", "norm_weight", "mixes", "rstd", "pre")

    @staticmethod
    def forward(
        residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, settings: HeadSettings
    ) -> tuple[Tensor, ...]:
        mixes, rstd = tk_mhc.mhc_pre_norm_fn(
            residual, fn[: len(base)], norm_weight, settings.norm_eps, n_splits=settings.n_splits, return_rstd=True
        )
        pre = tk_mhc.mhc_head_compute_mix(mixes, scale.view(1), base, settings.pre_eps).unsqueeze(-1)
        return tk_mhc.mhc_pre_apply_mix(residual, pre), mixes, rstd, pre

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        residual, fn, scale, base, norm_weight, mixes, rstd, pre = ctx.saved
        d_residual, d_pre = tk_mhc.mhc_pre_apply_mix_bwd(d_y, residual, pre)
        d_mixes, d_scale, d_base = tk_mhc.mhc_head_compute_mix_bwd(d_pre.squeeze(-1), mixes, scale.view(1), base)
        d_residual, d_fn, d_norm_weight = tk_mhc.mhc_pre_norm_fn_bwd(
            d_mixes, residual, fn[: len(base)], norm_weight, mixes, rstd, d_residual=d_residual
        )
        if len(fn) > len(base):
            d_fn = torch.nn.functional.pad(d_fn, (0, 0, 0, len(fn) - len(base)))
        return d_residual, d_fn, d_scale.view(scale.shape), d_base, d_norm_weight


def check_mhc_mult(mhc_mult: int) -> None:
    """Raise TypeError or ValueError unless mhc_mult is 2, 4 or 8."""
    check.integer("mhc_mult", mhc_mult)
    check.one_of("mhc_mult", mhc_mult, (2, 4, 8))


def check_hidden(name: str, hidden: int) -> None:
    """Raise TypeError or ValueError unless hidden is a multiple of 64, 64 to 8192."""
    check.in_range(name, hidden, 64, 8192)
    check.multiple_of(name, hidden, 64)


def _check_pre(
    residual: Tensor, parameters: MixParameters, mhc_mult: int, settings: PreSettings, pre_mix: Tensor | None
) -> None:
    fn, scale, base, norm_weight = parameters
    leading = _check_streams(residual, mhc_mult)
    width = residual.shape[-2] * residual.shape[-1]
    _check_float32(residual, fn=(fn, ("rows", width)))
    num_rows, counts = fn.shape[0], (mhc_mult * (mhc_mult + 2), 2 * mhc_mult)
    check.require(num_rows in counts, "rows of fn", "{}, or {} without comb", num_rows, *counts)
    _check_float32(residual, scale=(scale, (3 if num_rows == counts[0] else 2,)), base=(base, (num_rows,)))
    if norm_weight is not None:
        _check_float32(residual, norm_weight=(norm_weight, (width,)))
    check.flag("shifted", settings.shifted)
    if pre_mix is not None:
        check.require(settings.shifted, "pre_mix", "None without shifted", "a tensor")
        _check_float32(residual, pre_mix=(pre_mix, (*leading, mhc_mult, 1)))
    check.number("norm_eps", settings.norm_eps, at_least=0)
    check.number("post_mult_value", settings.post_mult_value)
    check.number("pre_eps", settings.pre_eps, at_least=0)
    check.number("sinkhorn_eps", settings.sinkhorn_eps, at_least=0)
    check.in_range("sinkhorn_repeat", settings.sinkhorn_repeat, 1, 1000)
    check.number("post_eps", settings.post_eps, at_least=0)


def _check_head(residual: Tensor, parameters: MixParameters, mhc_mult: int, settings: HeadSettings) -> None:
    fn, scale, base, norm_weight = parameters
    _check_streams(residual, mhc_mult)
    width = residual.shape[-2] * residual.shape[-1]
    _check_float32(residual, fn=(fn, ("rows", width)), base=(base, (mhc_mult,)))
    rows = (mhc_mult, mhc_mult * (mhc_mult + 2))
    check.require(fn.shape[0] in rows, "rows of fn", "{} or {}", fn.shape[0], *rows)
    _check_float32(residual, scale=(scale, (1,) if getattr(scale, "ndim", 1) else ()))
    if norm_weight is not None:
        _check_float32(residual, norm_weight=(norm_weight, (width,)))
    check.number("norm_eps", settings.norm_eps, at_least=0)
    check.number("pre_eps", settings.pre_eps)


def _check_streams(residual: Tensor, mhc_mult: int) -> tuple[int, ...]:
    """Check the residual, and return its leading dimensions."""
    check_mhc_mult(mhc_mult)
    *leading, _, hidden = check.tensor("residual", residual, (torch.bfloat16,), (..., mhc_mult, "hidden"))
    check_hidden("hidden (last dimension of residual)", hidden)
    return tuple(leading)


def _check_float32(residual: Tensor, **tensors: tuple[Tensor, check.Shape]) -> None:
    """Check that tensors are float32, contiguous, of their shapes and on the residual's device."""
    for name, (x, shape) in tensors.items():
        check.tensor(name, x, (torch.float32,), shape, device=residual.device)
