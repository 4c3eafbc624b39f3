"""Shared by the autograd functions: what torch.func asks of them, main_grad and a layer that adds to it, autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.autograd.function import once_differentiable as torch_once_differentiable
from torch.compiler import is_compiling

from tk_core import check

Backward = Callable[..., Any]


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether an autograd function has to compute what depends on these tensors, as a derivative may be asked for.

    So it is for all tensors of torch.func's transforms: only in an autograd function they have memory. Raises
    NotImplementedError for forward mode, see `refuse_tangents`.
    """
    # An argument that is no tensor is for the caller's checks to refuse.
    given = [x for x in tensors if isinstance(x, Tensor)]
    refuse_tangents(*given)
    if not is_compiling() and peek_interpreter_stack() is not None:
        return any(x.requires_grad or is_functorch_wrapped_tensor(x) for x in given)
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if one of the tensors has a tangent: our functions have no forward-mode derivative."""
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise NotImplementedError(
            "forward mode (torch.func.jvp, torch.autograd.forward_ad): tk_modeling has derivatives in reverse mode "
            "only; use backward, torch.func.grad or torch.func.vjp"
        )


def _has_tangent(x: Tensor | None) -> bool:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # torch.vmap has no rule for it, nor for the autograd functions
        return False


def once_differentiable(backward: Backward) -> Backward:
    """torch's decorator of a backward that has no derivative, for torch.func's transforms too.

    These do not see that torch's hides a derivative from them, and call a backward with tensors that have no memory. So
    they get the backward as an autograd function, which torch calls with plain tensors.
    """
    once = torch_once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        # The transforms make a class of their own from an autograd function.
        if is_compiling() or issubclass(ctx._forward_cls, torch.autograd.Function):
            return once(ctx, *grads)
        return _Backward.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return run


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(backward: Backward, ctx: Any, num_grads: int, *tensors: Tensor | None) -> Any:
        return backward(_Saved(ctx, tensors[num_grads:]), *tensors[:num_grads])

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> None:
        raise RuntimeError("gradient of a gradient: tk_modeling's functions are differentiable once")


class _Saved:
    """The context of a forward with other saved tensors."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._ctx = ctx
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def main_grad_of(name: str, parameter: Tensor | None) -> Tensor | None:
    """The parameter's `main_grad`, the float32 tensor that its gradients are added to, or None if it has none.

    To be called on the parameter itself, not on a cast or a view of it. An autograd function takes the result as an
    argument and keeps it as an attribute of ctx: a saved tensor must not change before the backward, and another
    backward may add to this one.

    Raises:
        ValueError: main_grad is not a float32 tensor of the shape and device of the parameter, which `name` names.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return None
    shape, device = tuple(parameter.shape), parameter.device
    is_tensor = isinstance(main_grad, Tensor)
    found = (main_grad.dtype, tuple(main_grad.shape), main_grad.device) if is_tensor else type(main_grad)
    wanted = (torch.float32, shape, device)
    check.require(found == wanted, f"main_grad of {name}", "a tensor of dtype, shape and device {}", found, wanted)
    return main_grad


def add_to_main_grad(main_grad: Tensor | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Add the float32 `grad` to main_grad and return None; without a main_grad return grad as `dtype`.

    A backward returns the result as the parameter's gradient.
    """
    if main_grad is None:
        return grad.to(dtype)
    main_grad.add_(grad)
    return None


def as_float32(parameter: Tensor) -> Tensor:
    """The parameter, cast differentiably if it is not float32; the cast has the parameter's main_grad."""
    if parameter.dtype == torch.float32:
        return parameter
    wide = parameter.float()
    if hasattr(parameter, "main_grad"):
        wide.main_grad = parameter.main_grad
    return wide


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a (i, k) · b (k, j), or one for each of a batch, in float32, not rounded to their dtype; not differentiable."""
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.mm if a.dim() == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)
    # A backward may run under autocast, which would round the operands.
    with without_autocast(a):
        return a.float() @ b.float()


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast is off for the device of x; x may be a meta tensor."""
    return torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False)


def autocast_to_bf16(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors; float32 ones are cast to bfloat16 where autocast to it is on for their device. Differentiable."""
    return tuple(x.to(torch.bfloat16) if _autocasts_to_bf16(x) else x for x in tensors)


def _autocasts_to_bf16(x: Tensor) -> bool:
    # An argument that is no tensor is for the caller's checks to refuse.
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return False
    # A meta tensor stands for one of any device.
    devices = ("cuda", "cpu") if x.is_meta else (x.device.type,)
    return any(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) == torch.bfloat16 for d in devices)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, i) · weight (o, i)ᵀ, as torch.nn.functional.linear; weight's gradient is added to its main_grad, if any.

    It is then computed in float32 and not rounded to weight's dtype.
    """
    main_grad = main_grad_of("weight", weight)
    if main_grad is None or not needs_gradients(weight):
        return torch.nn.functional.linear(x, weight)
    x, weight = autocast_to_bf16(x, weight)
    return _LinearToMainGrad.apply(x, weight, main_grad)


class _LinearToMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, weight, ctx.main_grad = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_y: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            d_rows, rows = (z.reshape(-1, z.shape[-1]) for z in (d_y, x))
            add_to_main_grad(ctx.main_grad, float32_product(d_rows.t(), rows), torch.float32)
        return d_y @ weight if ctx.needs_input_grad[0] else None, None, None
