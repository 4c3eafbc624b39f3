"""@replayable: a repeated eager call launches its kernels again without running the function's Python.

What such a function allocates and launches depends on the metadata of its tensors and on plain values alone, and so do
the checks of TileLang's host code. The first call with given ones is recorded, later ones repeat it with their tensors.
"""

from collections.abc import Callable
from contextvars import ContextVar
from enum import IntEnum
from functools import wraps
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.nn import Parameter

from tk_core import check, kernel, op
from tk_core.num_sms import get_limit

Function = TypeVar("Function", bound=Callable[..., Any])
Repeat = tuple[Callable[[list[Any]], Any], list[tuple[int, int]]]
"""What repeats a call, and pairs of its arguments, one of them returned as `out` is, that must not overlap for that."""

_MAX_CALLS = 4096
_PLAIN = frozenset((int, bool, str, torch.dtype, type(None)))
# Workspaces of the call that is being recorded; None while none is.
_workspaces: ContextVar[list[Tensor] | None] = ContextVar("_workspaces", default=None)


def new_workspace(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on the device of `like`, and of its dtype if none is given, for one kernel to leave to the next.

    Nothing but the kernels of one call may write or read it: then `@replayable` remembers the call.
    """
    workspace = like.new_empty(shape, dtype=dtype)
    if not is_compiling() and (recorded := _workspaces.get()) is not None:
        recorded.append(workspace)
    return workspace


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...] | None]:
    """The arguments, behind them what is in tuples, and the call's key: all that its launches depend on, or None."""
    values, device = [*args, *kwargs.values()], op.current_device()
    key: list[Any] = [tuple(kwargs), get_limit(), device]
    try:
        for x in values:
            kind = type(x)
            if (kind is Tensor or kind is Parameter) and x.get_device() == device:
                key.append((x.dtype, x.shape, x.stride(), x.data_ptr() & 15))
            elif kind in _PLAIN or issubclass(kind, IntEnum):
                key += kind, x
            elif kind is float:
                key += kind, x or str(x)  # 0.0 == -0.0
            elif kind is tuple:
                key += kind, len(x)
                values += x  # The loop goes on to these.
            else:
                return values, None
        return values, tuple(key)
    except RuntimeError:  # functorch's tensors have no address, sparse ones no strides
        return values, None


def _identity(x: Any) -> Any:
    """Equal for a value and what a kernel is given of it: for tensors, the address range and the dtype."""
    return (x.data_ptr(), check.extent(x), x.dtype) if isinstance(x, Tensor) else id(x)


def _picker(wanted: Any) -> Callable[[list[Any]], Any]:
    """Picks the value with this number, or those with the numbers in this tuple and in tuples within it."""
    if type(wanted) is not tuple:
        return itemgetter(wanted)
    if len(wanted) > 1 and tuple not in map(type, wanted):  # `itemgetter` returns no tuple of one.
        return itemgetter(*wanted)
    picks = [_picker(x) for x in wanted]
    return lambda values: tuple([pick(values) for pick in picks])


def _leaves(result: Any) -> list[Any]:
    """What a call returns, out of its tuples."""
    return [leaf for x in result for leaf in _leaves(x)] if type(result) is tuple else [result]


def _repeat_of(values: list[Any], launches: list[Any], workspaces: list[Tensor], result: Any) -> Repeat | None:
    """What does the same for another list like `values`; None if it is not clear which tensor a kernel was given.

    Arguments, constants, outputs, workspaces and views of these have numbers, in this order.
    """
    results = _leaves(result)
    arguments = {number: x for number, x in enumerate(values) if isinstance(x, Tensor)}
    outputs = [x for x in results if isinstance(x, Tensor) and not any(x is y for y in arguments.values())]
    if not (launches and results) or any(x.layout is not torch.strided for x in outputs):
        return None
    operands = [x for _, operands in launches for x in operands]
    constants = [None, *(x for x in operands if not isinstance(x, Tensor))]
    allocated = [*outputs, *workspaces]
    known = [*values, *constants, *allocated]
    number_of = {_identity(x): number for number, x in enumerate(known)}
    tensors, used = [*arguments.values(), *allocated], {_identity(x) for x in operands}
    is_known = number_of.keys() >= {*used, *map(_identity, results)}
    is_written = all(_identity(x) in used for x in outputs if x.numel())
    is_clear = len(set(map(_identity, tensors))) == len(tensors)
    is_new = not any(check.overlap(x, y) for x in outputs for y in arguments.values())
    if not (is_known and is_written and is_clear and is_new):
        return None
    views: list[tuple[int, torch.Size, tuple[int, ...]]] = []

    def locate(x: Any) -> int:
        number = number_of[_identity(x)]
        if not isinstance(x, Tensor) or (x.shape, x.stride()) == (known[number].shape, known[number].stride()):
            return number
        views.append((number, x.shape, x.stride()))
        return len(known) + len(views) - 1

    def numbered(x: Any) -> Any:
        return tuple(map(numbered, x)) if type(x) is tuple else number_of[_identity(x)]

    located = [(compiled, _picker(tuple(map(locate, operands)))) for compiled, operands in launches]
    returned = [number_of[_identity(x)] for x in results]
    pick_result = _picker(numbered(result))
    # An empty tensor makes another of its dtype and device in less host time than naming both takes.
    allocations = [(x.new_empty((0,)), x.shape, x.stride()) for x in allocated]

    def repeat(values: list[Any]) -> Any:
        values += constants
        for like, shape, strides in allocations:
            values.append(like.new_empty_strided(shape, strides))
        for base, shape, strides in views:
            values.append(values[base].as_strided(shape, strides))
        for compiled, pick_operands in located:
            compiled(*pick_operands(values))
        return pick_result(values)

    return repeat, [(x, y) for x in arguments if x in returned for y in arguments if x != y]


def replayable(function: Function) -> Function:
    """Let repeated eager calls of a public function on a GPU skip its Python.

    What the function launches must depend on nothing but its arguments' metadata and plain values, and it must leave
    every element of its outputs to its kernels; `new_workspace` makes what these leave to each other. A call whose
    outputs or launches are of any other kind (views, copies, no launch at all) is not remembered, and runs as it is.
    """
    calls: dict[tuple[Any, ...] | None, Repeat | None] = {}

    @wraps(function)
    def replay(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not op.kernels_only or _len_torch_dispatch_stack() or _workspaces.get() is not None:
            return function(*args, **kwargs)
        values, key = _read(args, kwargs)
        if (call := calls.get(key)) is not None:
            repeat, pairs = call
            if not pairs or not any(check.overlap(values[x], values[y]) for x, y in pairs):
                return repeat(values)
        if key is None or key in calls:
            return function(*args, **kwargs)
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        before = _workspaces.set(workspaces := [])
        try:
            with kernel.recorded_launches() as launches:
                result = function(*args, **kwargs)
        finally:
            _workspaces.reset(before)
        calls[key] = _repeat_of(values, launches, workspaces, result)
        return result

    return replay  # type: ignore[return-value]
