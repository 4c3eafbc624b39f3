"""GroupedFP8Linear: each expert's linear layer over its segment of rows, in FP8 forward and backward.

The products, factors and recipe are those of FP8Linear; segments begin at multiples of 128 rows, as in
`tk_moe.get_fused_mapping` with alignment 128, and `ends` is its expert_psum.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

import tk_gemm
from tk_core import check
from tk_modeling.fp8.operands import (
    BLOCK,
    GRADIENT_CLAMP,
    Pair,
    cast_rows,
    cast_rows_and_columns,
    cast_weight,
    check_features,
    transposed,
    weight_gradient,
)
from tk_modeling.gradients import autocast_to_bf16, main_grad_of, needs_gradients


def grouped_fp8_linear(rows: Tensor, weight: Tensor, ends: Tensor, *, name: str = "weight") -> Tensor:
    """rows[s:e] · weight[i]ᵀ in FP8 for each expert i, with e = ends[i] and s = ends[i - 1] rounded up to 128.

    Rows of padding, from an expert's end to the next one's beginning, come out as zeros. They must be zeros, and so
    must their incoming gradients, as with `expand_to_fused`, `swiglu` and `reduce_fused`. Rows past the last segment
    have no part in other results, forward or backward; their own are unspecified. The gradient of weight is added to
    its main_grad, if it has one.

    Args:
        rows: (num_rows, in_features) bfloat16, or float32 under autocast to bfloat16; num_rows a multiple of 128.
        weight: (num_experts, out_features, in_features) bfloat16 or float32; both features multiples of 128. Cast in
            each call.
        ends: int32 (num_experts,), where the rows of each expert end, ascending.
        name: of weight in error messages.

    Returns:
        (num_rows, out_features) bfloat16.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device, or with TK_DEBUG=1 an expert
            whose rows end before they begin.
    """
    main_grad = main_grad_of(name, weight)
    (rows,) = autocast_to_bf16(rows)
    shape = ("num_experts", "out_features", "in_features")
    num_experts, out_features, in_features = check.tensor(name, weight, (torch.bfloat16, torch.float32), shape)
    check.multiple_of(f"in_features ({name}.shape[2])", in_features, BLOCK)
    check.multiple_of(f"out_features ({name}.shape[1])", out_features, BLOCK)
    device = weight.device
    num_rows, _ = check.tensor("rows", rows, (torch.bfloat16,), ("num_rows", in_features), device=device)
    check.multiple_of("rows.shape[0]", num_rows, BLOCK)
    check.tensor("ends", ends, (torch.int32,), (num_experts,), device=device)
    check.ends("ends", ends, BLOCK)
    operand = cast_weight(weight.detach())
    if not needs_gradients(rows, weight):
        return _product(cast_rows(rows), operand, ends)
    by_row, by_column = _casts(rows.detach(), weight.requires_grad)
    return _GroupedFP8Linear.apply(rows, weight, *by_row, *by_column, *operand, ends, main_grad)


def _product(rows: Pair, weight: Pair, ends: Tensor) -> Tensor:
    return tk_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weight, None, ends, use_psum_layout=True)


def _weight_product(d_y: Pair, rows: Pair, ends: Tensor, d: Tensor | None, c: Tensor | None) -> Tensor:
    return tk_gemm.k_grouped_fp8_gemm_nt_contiguous(d_y, rows, d, ends, c=c)


def _casts(
    x: Tensor, with_columns: bool, sf_clamp_min: float | None = None
) -> tuple[Pair, tuple[Tensor | None, Tensor | None]]:
    return cast_rows_and_columns(x, sf_clamp_min) if with_columns else (cast_rows(x, sf_clamp_min), (None, None))


class _GroupedFP8Linear(torch.autograd.Function):
    """Computes with the casts; rows and weight are there for their gradients."""

    @staticmethod
    def forward(
        rows: Tensor,
        weight: Tensor,
        rows_data: Tensor,
        rows_sf: Tensor,
        columns: Tensor | None,
        columns_sf: Tensor | None,
        data: Tensor,
        sf: Tensor,
        ends: Tensor,
        main_grad: Tensor | None,
    ) -> Tensor:
        return _product((rows_data, rows_sf), (data, sf), ends)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, weight, _, _, columns, columns_sf, data, sf, ends, ctx.main_grad = inputs
        ctx.dtype = weight.dtype
        ctx.save_for_backward(columns, columns_sf, *((data, sf) if rows.requires_grad else (None, None)), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        columns, columns_sf, data, sf, ends = ctx.saved_tensors
        by_row, by_column = _casts(d_y.contiguous(), columns is not None, GRADIENT_CLAMP)
        d_rows = None if data is None else _product(by_row, transposed((data, sf)), ends)
        d_weight = None
        if columns is not None:
            operands = by_column, (columns, columns_sf), ends
            d_weight = weight_gradient(_weight_product, ctx.main_grad, ctx.dtype, *operands)
        return d_rows, d_weight, *(None,) * 8


class GroupedFP8Linear(nn.Module):
    """`grouped_fp8_linear` with weights of its own, bfloat16 or float32 (num_experts, out_features, in_features).

    Both features are multiples of 128.

    Shapes:
        rows: (num_rows, in_features) bfloat16, or float32 under autocast to bfloat16; num_rows a multiple of 128.
        ends: int32 (num_experts,).
        returns: (num_rows, out_features) bfloat16.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check.in_range("num_experts", num_experts, 1, 2**31 - 1)
        check_features(BLOCK, in_features=in_features, out_features=out_features)
        self.weight = nn.Parameter(torch.empty((num_experts, out_features, in_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows · weight[i]ᵀ for the rows of each expert i."""
        return grouped_fp8_linear(rows, self.weight, ends)

    def extra_repr(self) -> str:
        num_experts, out_features, in_features = self.weight.shape
        return f"{num_experts}, {in_features}, {out_features}"
