"""GroupedFP8Linear: each expert's linear layer over its segment of rows, in FP8 forward and backward.

The products, factors and recipe are those of FP8Linear; segments begin at multiples of 128 rows, as in
`tk_moe.get_fused_mapping` with alignment 128, and `ends` is its expert_psum.
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


def grouped_fp8_linear(rows: Tensor, weight: Tensor, ends: Tensor, *, name: str = "weight") -> Tensor:
    """rows[s:e] · weight[i]ᵀ in FP8 for each expert i, with e = ends[i] and s = ends[i - 1] rounded up to 128.

    Rows of padding, from an expert's end to the next one's beginning, come out as zeros. They must be zeros
    (`TK_DEBUG=1` raises ValueError for others), and so must their incoming gradients, as with `expand_to_fused`,
    `swiglu` and `reduce_fused`. Rows past the last segment have no part in other results, forward or backward; their
    own are unspecified. The gradient of weight is added to its main_grad, if it has one.

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
            whose rows end before they begin, or padding that is not zero.
    """
    check.require_type(isinstance(name, str), "name", "a str", name)
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
    if check.reads_data(rows):
        _check_padding(rows, ends)
    if not needs_gradients(rows, weight):
        return _product(cast_rows(rows), cast_weight(weight), ends)
    return _GroupedFP8Linear.apply(rows, weight, main_grad, ends, weight.requires_grad)[0]


def _check_padding(rows: Tensor, ends: Tensor) -> None:
    for end in ends.tolist():
        wrong = rows[end : align(end, BLOCK)].any(dim=1).nonzero()
        if len(wrong):
            row = end + int(wrong[0])
            raise ValueError(f"rows: expected zeros in the padding from row {end} on, got others in row {row}")


def _product(rows: Pair, weight: Pair, ends: Tensor) -> Tensor:
    return tk_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weight, None, ends, use_psum_layout=True)


def _weight_product(d_y: Pair, rows: Pair, ends: Tensor, d: Tensor | None, c: Tensor | None) -> Tensor:
    return tk_gemm.k_grouped_fp8_gemm_nt_contiguous(d_y, rows, d, ends, c=c)


def _casts(
    x: Tensor, with_columns: bool, sf_clamp_min: float | None = None
) -> tuple[Pair, tuple[Tensor | None, Tensor | None]]:
    return cast_rows_and_columns(x, sf_clamp_min) if with_columns else (cast_rows(x, sf_clamp_min), (None, None))


class _GroupedFP8Linear(torch.autograd.Function):
    """All outputs but the first are for the backward alone: casts of weight, and of rows by columns if asked for."""

    @staticmethod
    def forward(
        rows: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor, with_columns: bool
    ) -> tuple[Tensor, ...]:
        operand = cast_weight(weight)
        by_row, by_column = _casts(rows, with_columns)
        return _product(by_row, operand, ends), *operand, *(by_column if with_columns else ())

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save_casts(ctx, *inputs[:3], output[1:], inputs[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if d_y is None:
            return (None,) * 5
        data, sf, columns, columns_sf, ends = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        by_row, by_column = _casts(d_y.contiguous(), needs_weight, GRADIENT_CLAMP)
        d_rows = None if not ctx.needs_input_grad[0] else _product(by_row, transposed((data, sf)), ends)
        d_weight = None
        if needs_weight:
            operands = by_column, (columns, columns_sf), ends
            d_weight = weight_gradient(_weight_product, ctx.main_grad, ctx.dtype, *operands)
        return d_rows, d_weight, None, None, None


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
        check_placement(device, dtype)
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
