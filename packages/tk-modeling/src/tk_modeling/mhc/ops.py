"""The single mHC ops of tk-mhc, differentiable. tk_mhc's docstrings say what each computes, and from what.

Each takes what tk_mhc's op of that name takes, and raises what it raises. Under autocast to bfloat16, float32 streams
and hidden states are cast first. Gradients of fn, norm_weight, scale and base are added to a parameter's float32
`main_grad`, if it has one. A gradient of a gradient is an error. mhc_multilayer_recompute, mhc_post_bwd, mhc_post_fwd
and mhc_pre_big_fuse are tk_mhc's ops themselves, not differentiable.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

import tk_mhc
from tk_core import check
from tk_mhc import mhc_multilayer_recompute as mhc_multilayer_recompute
from tk_mhc import mhc_post_bwd as mhc_post_bwd
from tk_mhc import mhc_pre_big_fuse as mhc_pre_big_fuse
from tk_modeling.gradients import add_to_main_grad, autocast_to_bf16, main_grad_of, once_differentiable, refuse_tangents

mhc_post_fwd = tk_mhc.mhc_post
Gradients = tuple[Tensor | None, ...]


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Copy each token's hidden state, bfloat16 (..., H), to its m streams (..., m, H). See tk_mhc.expand_to_mhc."""
    (hidden,) = autocast_to_bf16(hidden)
    refuse_tangents(hidden)
    return _ExpandToMhc.apply(hidden, mhc_mult, out)


class _ExpandToMhc(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, mhc_mult: int, out: Tensor | None) -> Tensor:
        return tk_mhc.expand_to_mhc(hidden, mhc_mult, out)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        _mark_written(ctx, inputs[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor) -> Gradients:
        return tk_mhc.expand_to_mhc_bwd(d_o.contiguous()), None, None


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int | None = None,
    *,
    return_rstd: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of the streams and their projection on mhc_fn: mixes (..., rows). See tk_mhc.mhc_pre_norm_fn.

    rstd, with `return_rstd`, carries no gradient.
    """
    check.flag("fuse_grad_acc", fuse_grad_acc)
    check.flag("return_rstd", return_rstd)
    main_grads = main_grad_of("mhc_fn", mhc_fn), main_grad_of("mhc_norm_weight", mhc_norm_weight)
    (residual,) = autocast_to_bf16(residual)
    refuse_tangents(residual, mhc_fn, mhc_norm_weight)
    mixes, rstd = _MhcPreNormFn.apply(residual, mhc_fn, mhc_norm_weight, *main_grads, mhc_norm_eps, n_splits)
    return (mixes, rstd) if return_rstd else mixes


class _MhcPreNormFn(torch.autograd.Function):
    @staticmethod
    def forward(
        residual: Tensor,
        fn: Tensor,
        norm_weight: Tensor | None,
        fn_main_grad: Tensor | None,
        norm_main_grad: Tensor | None,
        eps: float,
        n_splits: int | None,
    ) -> tuple[Tensor, Tensor]:
        return tk_mhc.mhc_pre_norm_fn(residual, fn, norm_weight, eps, n_splits=n_splits, return_rstd=True)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        residual, fn, norm_weight, ctx.fn_main_grad, ctx.norm_main_grad, _, _ = inputs
        mixes, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(residual, fn, norm_weight, mixes, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_mixes: Tensor, _: Tensor) -> Gradients:
        # The op computes all gradients, whichever are asked for.
        grads = tk_mhc.mhc_pre_norm_fn_bwd(d_mixes.contiguous(), *ctx.saved_tensors)
        d_residual, d_fn, d_norm_weight = grads_asked_for(ctx, grads)
        d_fn = to_parameter(ctx.fn_main_grad, d_fn)
        return d_residual, d_fn, to_parameter(ctx.norm_main_grad, d_norm_weight), None, None, None, None


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixes as pre (..., m, 1), post (..., m, 1) and raw comb (..., m, m). See tk_mhc.mhc_pre_split_mixes."""
    main_grads = main_grad_of("mhc_scale", mhc_scale), main_grad_of("mhc_base", mhc_base)
    numbers = (mhc_mult, mhc_post_mult_value, mhc_pre_eps)
    refuse_tangents(input_mixes, mhc_scale, mhc_base)
    return _MhcPreSplitMixes.apply(input_mixes, mhc_scale, mhc_base, *main_grads, *numbers)


class _MhcPreSplitMixes(torch.autograd.Function):
    @staticmethod
    def forward(
        mixes: Tensor,
        scale: Tensor,
        base: Tensor,
        scale_main_grad: Tensor | None,
        base_main_grad: Tensor | None,
        mhc_mult: int,
        post_mult_value: float,
        pre_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return tk_mhc.mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        mixes, scale, base, ctx.scale_main_grad, ctx.base_main_grad, ctx.mhc_mult, ctx.post_mult_value, _ = inputs
        ctx.save_for_backward(mixes, scale, base)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *d_outputs: Tensor) -> Gradients:
        d_outputs = [d.contiguous() for d in d_outputs]
        grads = tk_mhc.mhc_pre_split_mixes_bwd(*d_outputs, *ctx.saved_tensors, ctx.mhc_mult, ctx.post_mult_value)
        d_mixes, d_scale, d_base = grads_asked_for(ctx, grads)
        d_scale, d_base = to_parameter(ctx.scale_main_grad, d_scale), to_parameter(ctx.base_main_grad, d_base)
        return d_mixes, d_scale, d_base, None, None, None, None, None


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Sinkhorn's iterations on float32 matrices (..., m, m). See tk_mhc.sinkhorn_normalize."""
    refuse_tangents(x)
    return _SinkhornNormalize.apply(x, repeat, eps)


class _SinkhornNormalize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, repeat: int, eps: float) -> Tensor:
        return tk_mhc.sinkhorn_normalize(x, repeat, eps)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.repeat, ctx.eps = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor) -> Gradients:
        (x,) = ctx.saved_tensors
        return tk_mhc.sinkhorn_normalize_bwd(d_o, x, ctx.repeat, ctx.eps), None, None


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Collapse the streams, Σ_s mix[s] · x[s]: bfloat16 (..., m, H) to (..., H). See tk_mhc.mhc_pre_apply_mix."""
    (x,) = autocast_to_bf16(x)
    refuse_tangents(x, mix)
    return _MhcPreApplyMix.apply(x, mix, out)


class _MhcPreApplyMix(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, mix: Tensor, out: Tensor | None) -> Tensor:
        return tk_mhc.mhc_pre_apply_mix(x, mix, out)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mix, out = inputs
        _mark_written(ctx, out)
        ctx.save_for_backward(x, mix)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor) -> Gradients:
        return *grads_asked_for(ctx, tk_mhc.mhc_pre_apply_mix_bwd(d_o.contiguous(), *ctx.saved_tensors)), None


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """The streams after a sublayer: post[n] · x + Σ_k comb[k, n] · residual[k]. See tk_mhc.mhc_post."""
    x, residual = autocast_to_bf16(x, residual)
    refuse_tangents(x, residual, post_layer_mix, comb_res_mix)
    return _MhcPost.apply(x, residual, post_layer_mix, comb_res_mix, out)


class _MhcPost(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor | None) -> Tensor:
        return tk_mhc.mhc_post(x, residual, post, comb, out)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, out = inputs
        _mark_written(ctx, out)
        ctx.save_for_backward(*saved)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor) -> Gradients:
        # The gradient of residual is a new tensor each time: mhc_pre's backward may add to it.
        return *grads_asked_for(ctx, tk_mhc.mhc_post_bwd(*ctx.saved_tensors, d_o)), None


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """Weights of the last collapse: float32 (..., m). See tk_mhc.mhc_head_compute_mix."""
    main_grads = main_grad_of("mhc_scale", mhc_scale), main_grad_of("mhc_base", mhc_base)
    refuse_tangents(input_mix, mhc_scale, mhc_base)
    return _MhcHeadComputeMix.apply(input_mix, mhc_scale, mhc_base, *main_grads, mhc_pre_eps)


class _MhcHeadComputeMix(torch.autograd.Function):
    @staticmethod
    def forward(
        mix: Tensor,
        scale: Tensor,
        base: Tensor,
        scale_main_grad: Tensor | None,
        base_main_grad: Tensor | None,
        pre_eps: float,
    ) -> Tensor:
        return tk_mhc.mhc_head_compute_mix(mix, scale, base, pre_eps)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        mix, scale, base, ctx.scale_main_grad, ctx.base_main_grad, _ = inputs
        ctx.save_for_backward(mix, scale, base)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_o: Tensor) -> Gradients:
        grads = tk_mhc.mhc_head_compute_mix_bwd(d_o.contiguous(), *ctx.saved_tensors)
        d_mix, d_scale, d_base = grads_asked_for(ctx, grads)
        d_scale, d_base = to_parameter(ctx.scale_main_grad, d_scale), to_parameter(ctx.base_main_grad, d_base)
        return d_mix, d_scale, d_base, None, None, None


def _mark_written(ctx: FunctionCtx, out: Tensor | None) -> None:
    if out is not None:
        ctx.mark_dirty(out)


def grads_asked_for(ctx: FunctionCtx, grads: Gradients) -> Gradients:
    """The gradients of the first inputs, None for those that need none."""
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))


def to_parameter(main_grad: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient that a backward returns for a float32 parameter; see add_to_main_grad. None if grad is None."""
    return None if grad is None else add_to_main_grad(main_grad, grad, torch.float32)
