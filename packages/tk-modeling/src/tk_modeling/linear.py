"""A linear layer whose weight may have a main_grad, and the product that is added there."""

import torch
from torch import Tensor

from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16, main_grad_of, needs_gradients, without_autocast


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, i) · weight (o, i)ᵀ, as torch.nn.functional.linear; weight's gradient is added to its main_grad, if any.

    It is then computed in float32 and not rounded to weight's dtype.
    """
    main_grad = main_grad_of("weight", weight)
    if main_grad is None or not needs_gradients(weight):
        return torch.nn.functional.linear(x, weight)
    x, weight = autocast_to_bf16(x, weight)
    return _LinearToMainGrad.call(x, weight, main_grads=(main_grad,))


class _LinearToMainGrad(Function):
    parameters = ("weight",)
    saves = ("x", "weight")

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        x, weight = ctx.saved
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d_x = d_y @ weight if needs_x else None
        if not needs_weight:
            return (d_x,)
        d_rows, rows = (z.reshape(-1, z.shape[-1]) for z in (d_y, x))
        return d_x, float32_product(d_rows.t(), rows)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a (i, k) · b (k, j), or one for each of a batch, in float32, not rounded to their dtype; not differentiable."""
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.mm if a.dim() == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)
    # A backward may run under autocast, which would round the operands.
    with without_autocast(a):
        return a.float() @ b.float()
