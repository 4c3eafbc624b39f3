"""The single mHC ops of tk-mhc, differentiable. tk_mhc's docstrings say what each computes, and from what.

Each takes what tk_mhc's op of that name takes, and raises what it raises. Under autocast to bfloat16, float32 streams
and hidden states are cast first. Gradients of fn, norm_weight, scale and base are added to a parameter's float32
`main_grad`, if it has one. A gradient of a gradient is an error. mhc_multilayer_recompute, mhc_post_bwd, mhc_post_fwd
and mhc_pre_big_fuse are tk_mhc's ops themselves, not differentiable.
"""

from torch import Tensor

import tk_mhc
from tk_core import check
from tk_mhc import mhc_multilayer_recompute as mhc_multilayer_recompute
from tk_mhc import mhc_post_bwd as mhc_post_bwd
from tk_mhc import mhc_pre_big_fuse as mhc_pre_big_fuse
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16

mhc_post_fwd = tk_mhc.mhc_post


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Copy each token's hidden state, bfloat16 (..., H), to its m streams (..., m, H). See tk_mhc.expand_to_mhc."""
    (hidden,) = autocast_to_bf16(hidden)
    return _ExpandToMhc.call(hidden, mhc_mult, out)


class _ExpandToMhc(Function):
    written = "out"

    @staticmethod
    def forward(hidden: Tensor, mhc_mult: int, out: Tensor | None) -> Tensor:
        return tk_mhc.expand_to_mhc(hidden, mhc_mult, out)

    @staticmethod
    def backward(ctx: Context, d_streams: Tensor) -> Tensor:
        return tk_mhc.expand_to_mhc_bwd(d_streams)


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
    (residual,) = autocast_to_bf16(residual)
    mixes, rstd = _MhcPreNormFn.call(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, n_splits)
    return (mixes, rstd) if return_rstd else mixes


class _MhcPreNormFn(Function):
    parameters = ("mhc_fn", "mhc_norm_weight")
    outputs = ("mixes", "rstd")
    saves = ("residual", "mhc_fn", "mhc_norm_weight", "mixes", "rstd")

    @staticmethod
    def forward(
        residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, eps: float, n_splits: int | None
    ) -> tuple[Tensor, Tensor]:
        return tk_mhc.mhc_pre_norm_fn(residual, mhc_fn, mhc_norm_weight, eps, n_splits=n_splits, return_rstd=True)

    @staticmethod
    def backward(ctx: Context, d_mixes: Tensor) -> Gradients:
        return tk_mhc.mhc_pre_norm_fn_bwd(d_mixes, *ctx.saved)


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    *,
    mhc_post_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The mixes as pre (..., m, 1), post (..., m, 1) and raw comb (..., m, m). See tk_mhc.mhc_pre_split_mixes."""
    numbers = mhc_mult, mhc_post_mult_value, mhc_pre_eps, mhc_post_eps
    pre, post, comb = _MhcPreSplitMixes.call(input_mixes, mhc_scale, mhc_base, *numbers)
    return pre, post, None if input_mixes.shape[-1] == 2 * mhc_mult else comb


class _MhcPreSplitMixes(Function):
    parameters = ("mhc_scale", "mhc_base")
    saves = ("mixes", "mhc_scale", "mhc_base", "mhc_mult", "post_mult_value")

    @staticmethod
    def forward(
        mixes: Tensor,
        mhc_scale: Tensor,
        mhc_base: Tensor,
        mhc_mult: int,
        post_mult_value: float,
        pre_eps: float,
        post_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers = mhc_mult, post_mult_value, pre_eps
        pre, post, comb = tk_mhc.mhc_pre_split_mixes(mixes, mhc_scale, mhc_base, *numbers, mhc_post_eps=post_eps)
        return pre, post, post.new_empty(0) if comb is None else comb

    @staticmethod
    def backward(ctx: Context, d_pre: Tensor | None, d_post: Tensor | None, d_comb: Tensor | None) -> Gradients:
        return split_mixes_bwd((d_pre, d_post, d_comb), *ctx.saved)


def split_mixes_bwd(
    d_outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    mhc_mult: int,
    post_mult_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """tk_mhc.mhc_pre_split_mixes_bwd, zeros where an output gets no gradient."""
    d_pre, d_post, d_comb = (
        mixes.new_zeros((*mixes.shape[:-1], mhc_mult, columns)) if d is None else d
        for d, columns in zip(d_outputs, (1, 1, mhc_mult))
    )
    if mixes.shape[-1] == 2 * mhc_mult:
        d_comb = None
    return tk_mhc.mhc_pre_split_mixes_bwd(d_pre, d_post, d_comb, mixes, scale, base, mhc_mult, post_mult_value)


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Sinkhorn's iterations on float32 matrices (..., m, m). See tk_mhc.sinkhorn_normalize."""
    return _SinkhornNormalize.call(x, repeat, eps)


class _SinkhornNormalize(Function):
    saves = ("x", "repeat", "eps")

    @staticmethod
    def forward(x: Tensor, repeat: int, eps: float) -> Tensor:
        return tk_mhc.sinkhorn_normalize(x, repeat, eps)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Tensor:
        return tk_mhc.sinkhorn_normalize_bwd(d_y, *ctx.saved)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Collapse the streams, Σ_s mix[s] · x[s]: bfloat16 (..., m, H) to (..., H). See tk_mhc.mhc_pre_apply_mix."""
    (x,) = autocast_to_bf16(x)
    return _MhcPreApplyMix.call(x, mix, out)


class _MhcPreApplyMix(Function):
    written = "out"
    saves = ("x", "mix")

    @staticmethod
    def forward(x: Tensor, mix: Tensor, out: Tensor | None) -> Tensor:
        return tk_mhc.mhc_pre_apply_mix(x, mix, out)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        return tk_mhc.mhc_pre_apply_mix_bwd(d_y, *ctx.saved)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """The streams after a sublayer: post[n] · x + Σ_k comb[k, n] · residual[k], comb None for the identity.

    See tk_mhc.mhc_post.
    """
    x, residual = autocast_to_bf16(x, residual)
    return _MhcPost.call(x, residual, post_layer_mix, comb_res_mix, out)


class _MhcPost(Function):
    written = "out"
    saves = ("x", "residual", "post", "comb")

    @staticmethod
    def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None, out: Tensor | None) -> Tensor:
        return tk_mhc.mhc_post(x, residual, post, comb, out)

    @staticmethod
    def backward(ctx: Context, d_out: Tensor) -> Gradients:
        # The gradient of residual is a new tensor each time: mhc_pre's backward may add to it.
        return tk_mhc.mhc_post_bwd(*ctx.saved, d_out)


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """Weights of the last collapse: float32 (..., m). See tk_mhc.mhc_head_compute_mix."""
    return _MhcHeadComputeMix.call(input_mix, mhc_scale, mhc_base, mhc_pre_eps)


class _MhcHeadComputeMix(Function):
    parameters = ("mhc_scale", "mhc_base")
    saves = ("mix", "mhc_scale", "mhc_base")

    @staticmethod
    def forward(mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, pre_eps: float) -> Tensor:
        return tk_mhc.mhc_head_compute_mix(mix, mhc_scale, mhc_base, pre_eps)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        return tk_mhc.mhc_head_compute_mix_bwd(d_y, *ctx.saved)
