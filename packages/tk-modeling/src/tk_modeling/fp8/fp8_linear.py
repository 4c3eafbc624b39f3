"""FP8Linear: a linear layer whose three products, forward and backward, are FP8 ones with block scales.

    y = X · Wᵀ     dX = dY · W     dW = dYᵀ · X

An operand has a scale factor for 128 neighbours along the dimension that is summed over: X and dY by rows for y and dX,
by columns for dW. W has one for each 128 × 128, so that its transpose has the same values. The recipe is that of
DeepSeek-V3's training (arXiv 2412.19437, section 3.3).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import tk_gemm
from tk_core import check
from tk_core.math import align
from tk_modeling.fp8.operands import (
    BLOCK,
    GRADIENT_CLAMP,
    Pair,
    cast_rows,
    cast_rows_and_columns,
    cast_weight,
    check_features,
    save_casts,
    transposed,
    weight_gradient,
)
from tk_modeling.gradients import autocast_to_bf16, main_grad_of, needs_gradients, once_differentiable
from tk_modeling.options import check_placement


def fp8_linear(x: Tensor, weight: Tensor, *, name: str = "weight") -> Tensor:
    """x · weightᵀ in FP8, as are both gradients; that of weight is added to its main_grad, if it has one.

    Args:
        x: (..., in_features) bfloat16, or float32 under autocast to bfloat16.
        weight: (out_features, in_features) bfloat16 or float32; both features multiples of 128. Cast in each call.
        name: of weight in error messages.

    Returns:
        (..., out_features) bfloat16.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device.
    """
    check.require_type(isinstance(name, str), "name", "a str", name)
    main_grad = main_grad_of(name, weight)
    (rows,) = autocast_to_bf16(x)
    dtypes = (torch.bfloat16, torch.float32)
    out_features, in_features = check.tensor(name, weight, dtypes, ("out_features", "in_features"))
    check.multiple_of(f"in_features ({name}.shape[1])", in_features, BLOCK)
    check.multiple_of(f"out_features ({name}.shape[0])", out_features, BLOCK)
    check.tensor("x", rows, (torch.bfloat16,), (..., in_features), device=weight.device, layout="any")
    rows = rows.reshape(-1, in_features)
    y = _linear(rows, weight, main_grad)
    return y.view(*x.shape[:-1], out_features)


def _linear(x: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    if not needs_gradients(x, weight):
        return tk_gemm.fp8_gemm_nt(cast_rows(x), cast_weight(weight))
    return _FP8Linear.apply(x, weight, main_grad, weight.requires_grad)[0]


def _is_zero(size: int) -> bool:
    """Whether a size is 0; not asked of one that torch.compile leaves open, which would make it compile for both."""
    if not torch.compiler.is_compiling():
        return size == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return statically_known_true(size == 0)


def _casts(
    x: Tensor, with_columns: bool, sf_clamp_min: float | None = None
) -> tuple[Pair, tuple[Tensor | None, Tensor | None]]:
    """x cast by rows and, if needed, by columns, the latter with zeros up to a multiple of 128 rows, at least 128."""
    if not with_columns:
        return cast_rows(x, sf_clamp_min), (None, None)
    num_rows = len(x)
    missing = max(align(num_rows, BLOCK), BLOCK) - num_rows
    if not _is_zero(missing):
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    (data, sf), by_column = cast_rows_and_columns(x, sf_clamp_min)
    return (data[:num_rows], sf[:num_rows]), by_column


def _weight_product(d_y: Pair, x: Pair, d: Tensor | None, c: Tensor | None) -> Tensor:
    """dYᵀ · X in float32; operands are transposed, with factors (rows / 128, channels)."""
    if d is None:
        d = d_y[0].new_empty((len(d_y[0]), len(x[0])), dtype=torch.float32)
    return tk_gemm.fp8_gemm_nt((d_y[0], d_y[1].t()), (x[0], x[1].t()), d, c, recipe=(1, 1, BLOCK))


class _FP8Linear(torch.autograd.Function):
    """All outputs but the first are for the backward alone: casts of weight, and of x by columns if asked for."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, main_grad: Tensor | None, with_columns: bool) -> tuple[Tensor, ...]:
        operand = cast_weight(weight)
        by_row, by_column = _casts(x, with_columns)
        return tk_gemm.fp8_gemm_nt(by_row, operand), *operand, *(by_column if with_columns else ())

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save_casts(ctx, *inputs[:3], output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_y is None:
            return (None,) * 4
        data, sf, columns, columns_sf = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        by_row, by_column = _casts(d_y.contiguous(), needs_weight, GRADIENT_CLAMP)
        d_x = None if not ctx.needs_input_grad[0] else tk_gemm.fp8_gemm_nt(by_row, transposed((data, sf)))
        d_weight = None
        if needs_weight:
            d_weight = weight_gradient(_weight_product, ctx.main_grad, ctx.dtype, by_column, (columns, columns_sf))
        return d_x, d_weight, None, None


class FP8Linear(nn.Module):
    """`fp8_linear` with a weight of its own, bfloat16 or float32 (out_features, in_features), both multiples of 128.

    Shapes:
        x: (..., in_features) bfloat16, or float32 under autocast to bfloat16.
        returns: (..., out_features) bfloat16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_features(BLOCK, in_features=in_features, out_features=out_features)
        check_placement(device, dtype)
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return fp8_linear(x, self.weight)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}"
