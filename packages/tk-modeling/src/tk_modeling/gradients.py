"""What differentiable functions ask of their arguments: derivatives, main_grad, autocast."""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tk_core import check


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


def main_grad_of(name: str, parameter: Tensor | None) -> Tensor | None:
    """The parameter's `main_grad`, the float32 tensor that its gradients are added to, or None if it has none.

    To be called on the parameter itself, not on a cast or a view of it.

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


def as_float32(parameter: Tensor) -> Tensor:
    """The parameter, cast differentiably if it is not float32; the cast has the parameter's main_grad."""
    if parameter.dtype == torch.float32:
        return parameter
    wide = parameter.float()
    if hasattr(parameter, "main_grad"):
        wide.main_grad = parameter.main_grad
    return wide


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
