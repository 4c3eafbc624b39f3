"""Function, the base of all autograd functions here: what they do beside the kernels of their forward and backward."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.compiler import is_compiling

from tk_modeling.gradients import main_grad_of, needs_gradients

Gradients = tuple[Tensor | None, ...]
"""What a backward returns."""


class Context(NamedTuple):
    """What a backward knows of the forward."""

    saved: list[Any]
    """The function's `saves`, in that order."""
    needs_input_grad: tuple[bool, ...]
    """Whether the gradient of each input is asked for: others need not be computed."""
    main_grads: dict[str, Tensor | None]
    """Of each parameter whose gradient is asked for, its main_grad, if it has one."""


class Function(torch.autograd.Function):
    """A function with a derivative in reverse mode, once, called by `call`. A subclass writes a forward and a backward:

        class _Scale(Function):
            parameters = ("weight",)
            saves = ("x", "weight", "eps")

            @staticmethod
            def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
                return scale(x, weight, eps)

            @staticmethod
            def backward(ctx: Context, d_y: Tensor) -> Gradients:
                return scale_bwd(d_y, *ctx.saved)

    The forward's first outputs have the gradients that the backward takes: contiguous, and None where one of several
    outputs gets none. Outputs behind them, tensors or not, carry no gradient, such as what is computed to be saved. An
    empty tensor stands for an output that there is not, as torch.compile traces no backward of one that is None.

    The backward returns the gradients of the first inputs, or the first one alone. Those that nobody asked for are let
    go; those of `parameters` are added to their main_grad, or cast to the parameter's dtype. A backward that adds to a
    main_grad itself returns that main_grad.
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    """Inputs that may have a main_grad."""
    saves: ClassVar[tuple[str, ...]] = ()
    """Inputs and outputs that the backward gets."""
    saves_for: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Of these, (name, input): what is saved only for that input's gradient, and None where the input is frozen."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Names of the outputs, if some are saved."""
    written: ClassVar[str] = ""
    """The input that the forward writes its result to, unless it is None."""

    call: ClassVar[Callable[..., Any]]
    """call(*inputs) gives the forward's outputs, with a graph where a derivative may be asked for.

    `main_grads`, by keyword, are those of `parameters`; None for those of the inputs of these names. They have to be
    the parameters' own, as torch.compile may not save a view that another backward changes.
    """

    def __init_subclass__(cls) -> None:
        """Make torch's methods of the subclass's own ones, as closures, which torch.compile can trace."""
        compute, differentiate = cls.forward, cls.backward
        inputs = tuple(inspect.signature(compute).parameters)
        num_grads = len(inspect.signature(differentiate).parameters) - 1
        parameters = [(name, inputs.index(name)) for name in cls.parameters]
        # torch's forward takes the main_grads behind the inputs. Saved is, by its place in this order, what is `given`.
        given = (*inputs, *(f"main_grad of {name}" for name in cls.parameters), *cls.outputs)
        places = {name: given.index(name) for name in (*cls.saves, *dict(cls.saves_for).values())}
        users = {name: places[user] for name, user in cls.saves_for}
        saves = [(places[name], users.get(name)) for name in cls.saves]
        written = inputs.index(cls.written) if cls.written else None
        nothing = (None,) * (len(inputs) + len(parameters))

        def call(*values: Any, main_grads: Sequence[Tensor | None] | None = None) -> Any:
            if not needs_gradients(*values):
                return compute(*values)
            if main_grads is None:
                main_grads = [main_grad_of(name, values[i]) for name, i in parameters]
            return cls.apply(*values, *main_grads)

        def forward(*args: Any) -> Any:
            return compute(*args[: len(inputs)])

        def setup_context(ctx: FunctionCtx, args: tuple[Any, ...], found: Any) -> None:
            found = found if isinstance(found, tuple) else (found,)
            given = (*args, *found)
            saved = [
                given[i] if i < len(given) and (user is None or given[user].requires_grad) else None
                for i, user in saves
            ]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))
            # What is no tensor. A main_grad is not saved as one: it may change before the backward, by another one.
            ctx.options = [None if isinstance(x, Tensor) else x for x in saved]
            ctx.main_grads = args[len(inputs) :]
            ctx.dtypes = [getattr(args[i], "dtype", None) for _, i in parameters]
            ctx.set_materialize_grads(False)
            if len(found) > num_grads:
                ctx.mark_non_differentiable(*(x for x in found[num_grads:] if isinstance(x, Tensor)))
            if written is not None and args[written] is not None:
                ctx.mark_dirty(args[written])

        def backward(ctx: Any, saved: tuple[Tensor | None, ...], *d_outputs: Tensor | None) -> Gradients:
            d_outputs = [None if d is None else d.contiguous() for d in d_outputs[:num_grads]]
            if all(d is None for d in d_outputs):
                return nothing
            values = [option if x is None else x for x, option in zip(saved, ctx.options)]
            needed = ctx.needs_input_grad
            main_grads = {name: x for (name, i), x in zip(parameters, ctx.main_grads) if needed[i]}
            grads = differentiate(Context(values, needed, main_grads), *d_outputs)
            grads = grads if isinstance(grads, tuple) else (grads,)
            grads = [grad if is_needed else None for grad, is_needed in zip(grads, needed)]
            for (name, i), dtype in zip(parameters, ctx.dtypes):
                if i < len(grads):
                    grads[i] = _to_parameter(grads[i], main_grads.get(name), dtype)
            return *grads, *nothing[len(grads) :]

        # torch asks for it in each call.
        forward.__signature__ = inspect.signature(forward)
        cls.call = staticmethod(call)
        cls.forward, cls.setup_context = staticmethod(forward), staticmethod(setup_context)
        cls.backward = staticmethod(_once_differentiable(backward))


def _to_parameter(grad: Tensor | None, main_grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What torch gets as the gradient of a parameter: nothing where a main_grad gets it."""
    if grad is None or grad is main_grad:
        return None
    if main_grad is None:
        return grad.to(dtype)
    main_grad.add_(grad)
    return None


def _once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A backward of (ctx, saved tensors, *gradients) as torch wants it, an error where it is differentiated again.

    torch.func's transforms do not see that torch's decorator hides a derivative from them, and call a backward with
    tensors that have no memory. So they get it as an autograd function, which torch calls with plain tensors.
    """
    once = once_differentiable(lambda ctx, *grads: backward(ctx, ctx.saved_tensors, *grads))

    def run(ctx: Any, *grads: Tensor | None) -> Gradients:
        # The transforms make a class of their own from an autograd function.
        if is_compiling() or issubclass(ctx._forward_cls, torch.autograd.Function):
            return once(ctx, *grads)
        return _Backward.apply(
            lambda *tensors: backward(ctx, tensors[len(grads) :], *tensors[: len(grads)]), *grads, *ctx.saved_tensors
        )

    return run


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(backward: Callable[..., Gradients], *tensors: Tensor | None) -> Gradients:
        return backward(*tensors)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Gradients) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor | None) -> None:
        raise RuntimeError("gradient of a gradient: tk_modeling's functions are differentiable once")
