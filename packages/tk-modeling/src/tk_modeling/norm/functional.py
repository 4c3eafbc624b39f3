"""Differentiable RMSNorm, with or without a residual."""

from torch import Tensor

import tk_quant
from tk_modeling.function import Context, Function, Gradients


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    *,
    out_scale: float = 1.0,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of each row of x, or of x + residual: `tk_quant.norm_forward`, differentiable.

    The gradient of the weight is computed in float32. If the weight has a float32 `main_grad`, it is added there in
    place and `.grad` stays None.

    Args:
        x: (..., T, H) bfloat16 or float32, H a multiple of 8 up to 16384; any strides but the last, see there.
        weight: (H), or (G, H) with one weight for each x[..., g, :], of x's dtype or float32; None for 1.
        eps: added to the mean square.
        residual: like x.
        out_scale: a factor of the weight.
        weight_offset: added to the weight; 1 in Gemma's norms.
        round_before_weight: round to x's dtype before the product with the weight, as most of Hugging Face's models do.

    Returns:
        out, like x; with a residual `(out, norm_input)`, norm_input being x + residual in x's dtype, the residual of
        the next norm.

    Raises:
        TypeError, ValueError: as tk_quant.norm_forward.
    """
    options = eps, out_scale, weight_offset, round_before_weight
    if residual is None:
        return _RmsNorm.call(x, weight, *options)[0]
    return _AddRmsNorm.call(x, residual, weight, *options)[:2]


class _RmsNorm(Function):
    parameters = ("weight",)
    saves = ("x", "weight", "rstd", "out_scale", "weight_offset")
    outputs = ("out", "rstd")

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, eps: float, out_scale: float, weight_offset: float, round_before_weight: bool
    ) -> tuple[Tensor, Tensor]:
        options = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        return tk_quant.norm_forward(x, weight, eps, None, out_scale, with_rstd=True, **options)[:2]

    @staticmethod
    def backward(ctx: Context, d_out: Tensor) -> Gradients:
        return _gradients(ctx, d_out, None)


class _AddRmsNorm(Function):
    parameters = ("weight",)
    saves = ("norm_input", "weight", "rstd", "out_scale", "weight_offset")
    outputs = ("out", "norm_input", "rstd")

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        out_scale: float,
        weight_offset: float,
        round_before_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        out, rstd, norm_input = tk_quant.norm_forward(x, weight, eps, residual, out_scale, with_rstd=True, **options)
        return out, norm_input, rstd

    @staticmethod
    def backward(ctx: Context, d_out: Tensor | None, d_norm_input: Tensor | None) -> Gradients:
        if d_out is None:
            return d_norm_input, d_norm_input, None
        d_x, d_weight = _gradients(ctx, d_out, d_norm_input)
        return d_x, d_x, d_weight


def _gradients(ctx: Context, d_out: Tensor, d_norm_input: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of norm_input and of the weight."""
    norm_input, weight, rstd, out_scale, weight_offset = ctx.saved
    main_grad = ctx.main_grads.get("weight")
    given = (d_out, norm_input, weight, rstd, d_norm_input, out_scale, main_grad)
    return tk_quant.norm_backward(*given, weight_offset=weight_offset)
