"""fp8_linear, and grouped_fp8_linear for each expert's segment of rows: FP8 products forward and backward.

    y = X · Wᵀ     dX = dY · W     dW = dYᵀ · X

An operand has a scale factor for 128 neighbours along the dimension that is summed over: X and dY by rows for y and dX,
by columns for dW. W has one for each 128 × 128, so that its transpose has the same values. The recipe is that of
DeepSeek-V3's training (arXiv 2412.19437, section 3.3). Experts' segments begin at multiples of 128 rows, as in
`tk_moe.get_fused_mapping` with alignment 128, and `ends` is its expert_psum.
"""

import torch
from torch import Tensor

import tk_gemm
from tk_core import check
from tk_core.math import align
from tk_core.op import launching, op
from tk_modeling.fp8.operands import (
    BLOCK,
    GRADIENT_CLAMP,
    Pair,
    cast_rows,
    cast_rows_and_columns,
    cast_weight,
    transposed,
)
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16, main_grad_of, needs_gradients


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
    y, *_ = _FP8Linear.call(rows, weight, None, needs_gradients(weight), main_grads=(main_grad,))
    return y.view(*x.shape[:-1], out_features)


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
    return _FP8Linear.call(rows, weight, ends, needs_gradients(weight), main_grads=(main_grad,))[0]


def _check_padding(rows: Tensor, ends: Tensor) -> None:
    for end in ends.tolist():
        wrong = rows[end : align(end, BLOCK)].any(dim=1).nonzero()
        if len(wrong):
            row = end + int(wrong[0])
            raise ValueError(f"rows: expected zeros in the padding from row {end} on, got others in row {row}")


class _FP8Linear(Function):
    """Of experts where there are `ends`. It casts x by columns, too, for the gradient of weight."""

    parameters = ("weight",)
    outputs = ("y", "data", "sf", "columns", "columns_sf")
    saves = ("data", "sf", "columns", "columns_sf", "ends")
    saves_for = (("data", "x"), ("sf", "x"))

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ends: Tensor | None, with_columns: bool) -> tuple[Tensor, ...]:
        operand = cast_weight(weight)
        by_row, by_column = _casts(x, ends, with_columns)
        return _product(by_row, operand, ends), *operand, *(by_column if with_columns else ())

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        data, sf, columns, columns_sf, ends = ctx.saved
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d_x = d_weight = None
        by_row, by_column = _casts(d_y, ends, needs_weight, GRADIENT_CLAMP)
        if needs_x:
            d_x = _product(by_row, transposed((data, sf)), ends)
        if needs_weight:
            d_weight = _weight_product(by_column, (columns, columns_sf), ends, ctx.main_grads["weight"])
        return d_x, d_weight


def _product(x: Pair, weight: Pair, ends: Tensor | None) -> Tensor:
    if ends is None:
        return tk_gemm.fp8_gemm_nt(x, weight)
    return tk_gemm.m_grouped_fp8_gemm_nt_contiguous(x, weight, None, ends, use_psum_layout=True)


def _weight_product(d_y: Pair, x: Pair, ends: Tensor | None, main_grad: Tensor | None) -> Tensor:
    """dYᵀ · X in float32, of transposed operands: added to main_grad, which is returned, if that is contiguous."""
    if main_grad is None or not main_grad.is_contiguous():
        return _column_product(d_y, x, ends)
    # torch.compile can't see whether main_grad begins on 16 bytes, as the products need it.
    if torch.compiler.is_compiling() or main_grad.storage_offset() % 4:
        _add_weight_product(d_y, x, ends, main_grad)
    else:
        _column_product(d_y, x, ends, main_grad)
    return main_grad


@op(writes=("main_grad",), reference=lambda d_y, x, ends, main_grad: main_grad.add_(_column_product(d_y, x, ends)))
def _add_weight_product(d_y: Pair, x: Pair, ends: Tensor | None, main_grad: Tensor) -> None:
    """Add dYᵀ · X to main_grad. If that does not begin on 16 bytes, `@op` copies it, and copies the sum back."""
    if launching(main_grad):
        _column_product(d_y, x, ends, main_grad)


def _column_product(d_y: Pair, x: Pair, ends: Tensor | None, d: Tensor | None = None) -> Tensor:
    if ends is not None:
        return tk_gemm.k_grouped_fp8_gemm_nt_contiguous(d_y, x, d, ends, c=d)
    # A group of all rows: fp8_gemm_nt would do the same, but fill such a tensor itself, and so not be repeated.
    ends = d_y[0].new_full((1,), d_y[0].shape[1], dtype=torch.int32)
    return _column_product(d_y, x, ends, None if d is None else d.unsqueeze(0)).squeeze(0)


def _casts(
    x: Tensor, ends: Tensor | None, with_columns: bool, sf_clamp_min: float | None = None
) -> tuple[Pair, tuple[Tensor | None, Tensor | None]]:
    """x cast by rows and, if needed, by columns, the latter with zeros up to a multiple of 128 rows, at least 128.

    Rows of experts are a multiple of 128 already.
    """
    if not with_columns:
        return cast_rows(x, sf_clamp_min), (None, None)
    if ends is not None:
        return cast_rows_and_columns(x, sf_clamp_min)
    num_rows = len(x)
    missing = max(align(num_rows, BLOCK), BLOCK) - num_rows
    if not _is_zero(missing):
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    (data, sf), by_column = cast_rows_and_columns(x, sf_clamp_min)
    return (data[:num_rows], sf[:num_rows]), by_column


def _is_zero(size: int) -> bool:
    """Whether a size is 0; not asked of one that torch.compile leaves open, which would make it compile for both."""
    if not torch.compiler.is_compiling():
        return size == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return statically_known_true(size == 0)
