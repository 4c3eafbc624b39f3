"""grouped_linear: each expert's matrix product with its segment of rows; in FP8 it is `grouped_fp8_linear`."""

from itertools import pairwise

import torch
from torch import Tensor

from tk_core import check
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16, main_grad_of, without_autocast


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, *, name: str = "weight") -> Tensor:
    """rows[s:e] · weight[i]ᵀ for each expert i, whose segment of rows is s = ends[i - 1] to e = ends[i].

    On a GPU this is torch.nn.functional.grouped_mm, which waits for nothing on sm_90 and sm_100 (on others torch reads
    `ends` back). Rows past the last segment have no part in other results, forward or backward; their own results and
    gradients are unspecified. Rows of padding within a segment are multiplied like all others: they should be zeros,
    and so should their incoming gradients, as with `expand_to_fused`, `swiglu` and `reduce_fused`.

    The gradient of weight is added to its main_grad, if it has one. On a CPU it is not rounded to bfloat16 first; on a
    GPU it is, as torch has no grouped product with float32 results there.

    Args:
        rows: (num_rows, in_features), contiguous; bfloat16 or float32.
        weight: (num_experts, out_features, in_features) of the same dtype; both features multiples of 8. Under autocast
            to bfloat16 both may be float32.
        ends: int32 (num_experts,), ascending.
        name: of weight in error messages.

    Returns:
        (num_rows, out_features).

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride or device.
    """
    check.require_type(isinstance(weight, Tensor), name, "a torch.Tensor", weight)
    main_grad = main_grad_of(name, weight)
    rows, operand = autocast_to_bf16(rows, weight.detach())
    _, in_features = check.tensor("rows", rows, (torch.bfloat16, torch.float32), ("num_rows", "in_features"))
    shape = ("num_experts", "out_features", in_features)
    num_experts, out_features, _ = check.tensor(name, operand, (rows.dtype,), shape, device=rows.device)
    check.multiple_of("in_features (columns of rows)", in_features, 8)
    check.multiple_of(f"out_features ({name}.shape[1])", out_features, 8)
    check.tensor("ends", ends, (torch.int32,), (num_experts,), device=rows.device)
    return _GroupedLinear.call(rows, weight, operand, ends, main_grads=(main_grad,))


class _GroupedLinear(Function):
    """Computes with `operand`, the weight in the dtype of rows; weight is there for its gradient."""

    parameters = ("weight",)
    saves_for = (("rows", "weight"), ("operand", "rows"))
    saves = ("rows", "operand", "ends")

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, operand: Tensor, ends: Tensor) -> Tensor:
        return _products(rows, operand.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        rows, operand, ends = ctx.saved
        d_rows = None if operand is None else _products(d_y, operand, ends)
        return d_rows, None if rows is None else _products(d_y.t(), rows, ends)


def _products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """For each segment a[s:e] · b[i] if b has three dimensions, else a[:, s:e] · b[s:e], float32 on a CPU."""
    if not a.is_cuda:
        return _products_by_loop(a, b, ends)
    # A backward may run under autocast.
    with without_autocast(a):
        return torch.nn.functional.grouped_mm(a, b, offs=ends)


# An operator of its own, as it reads `ends` and torch.compile can't trace that.
@torch.library.custom_op("tk_modeling::products_by_loop", mutates_args=())
def _products_by_loop(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends.tolist()]
    segments = list(pairwise(bounds))
    with without_autocast(a):
        if b.dim() == 2:
            return torch.stack([a[:, s:e].float() @ b[s:e].float() for s, e in segments])
        out = a.new_empty((a.shape[0], b.shape[2]))
        for i, (s, e) in enumerate(segments):
            torch.mm(a[s:e], b[i], out=out[s:e])
        return out


@_products_by_loop.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 2:
        return a.new_empty((ends.shape[0], a.shape[0], b.shape[1]), dtype=torch.float32)
    return a.new_empty((a.shape[0], b.shape[2]))
