"""Records what a call allocates and launches, and makes a function of it that does the same for other arguments."""

from collections.abc import Callable
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tk_core import check, kernel, op

Repeat = tuple[Callable[[list[Any]], Any], list[tuple[int, int]]]
"""What repeats a call, and pairs of arguments that must not overlap for that; one of each is returned, as `out` is."""

workspaces: ContextVar[list[Tensor] | None] = ContextVar("workspaces", default=None)
"""Those of the call that is being recorded; None while none is."""


def new_workspace(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on the device of `like`, and of its dtype if none is given, for one kernel to leave to the next.

    Nothing but the kernels of one call may write or read it: then `@replayable` remembers the call.
    """
    workspace = like.new_empty(shape, dtype=dtype)
    if not is_compiling() and (recorded := workspaces.get()) is not None:
        recorded.append(workspace)
    return workspace


def record(function: Callable[..., Any], args: Any, kwargs: Any, values: list[Any]) -> tuple[Any, Repeat | None]:
    """Call the function. Returns its result, and what repeats the call, a function of such a list as `values`.

    `values` are the arguments, and what is in tuples among them. The next list has other tensors of the same metadata,
    and equal plain values. There is no such function (None) if the call did anything but allocate tensors and launch
    kernels that write them, or if it is not clear which of its tensors a kernel was given.
    """
    before = workspaces.set([])
    try:
        with kernel.recorded_launches() as launches:
            result = function(*args, **kwargs)
        return result, _repeat_of(values, launches, workspaces.get() or [], result)
    finally:
        workspaces.reset(before)


def _identity(x: Any) -> Any:
    """Equal for an argument and what a kernel is given of it: for tensors, the address range and the dtype."""
    return (x.data_ptr(), check.extent(x), x.dtype) if isinstance(x, Tensor) else id(x)


def _picker(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The values at these indices: `itemgetter`, which returns no tuple of one."""
    if len(indices) == 1:
        (only,) = indices
        return lambda values: (values[only],)
    return itemgetter(*indices)


def _repeat_of(values: list[Any], launches: list[Any], made: list[Tensor], result: Any) -> Repeat | None:
    """Values are numbered: the arguments, constants, what the call allocates (outputs, then `made`), views of these."""
    results = result if type(result) is tuple else (result,)
    arguments = [x for x in values if isinstance(x, Tensor)]
    outputs = [x for x in results if isinstance(x, Tensor) and not any(x is y for y in arguments)]
    if not (launches and results) or any(x.layout is not torch.strided for x in outputs):
        return None
    allocated = [*outputs, *made]
    operands = [x for _, operands in launches for x in operands]
    constants = [None, *(x for x in operands if not isinstance(x, Tensor))]
    known = [*values, *constants, *allocated]
    index_of = {_identity(x): index for index, x in enumerate(known)}
    used = {_identity(x) for x in operands}

    is_here = all(x.get_device() == op.current_device() for x in arguments)
    is_known = index_of.keys() >= {*used, *map(_identity, results)}
    is_written = all(_identity(x) in used for x in outputs if x.numel())
    is_clear = len({_identity(x) for x in (*arguments, *allocated)}) == len(arguments) + len(allocated)
    is_new = not any(check.overlap(x, y) for x in outputs for y in arguments)
    if not (is_here and is_known and is_written and is_clear and is_new):
        return None

    views: list[tuple[int, torch.Size, tuple[int, ...]]] = []

    def locate(x: Any) -> int:
        """The number of an operand. Another shape or other strides make it a view."""
        index = index_of[_identity(x)]
        if not isinstance(x, Tensor) or (x.shape, x.stride()) == (known[index].shape, known[index].stride()):
            return index
        views.append((index, x.shape, x.stride()))
        return len(known) + len(views) - 1

    located = [(compiled, _picker([locate(x) for x in operands])) for compiled, operands in launches]
    # An empty tensor makes another of its dtype and device in less host time than naming both takes.
    allocations = [(x.new_empty((0,)), x.shape, x.stride()) for x in allocated]
    returned = [index_of[_identity(x)] for x in results]
    pick_result = _picker(returned) if type(result) is tuple else itemgetter(*returned)

    def repeat(values: list[Any]) -> Any:
        values += constants
        for like, shape, strides in allocations:
            values.append(like.new_empty_strided(shape, strides))
        for base, shape, strides in views:
            values.append(values[base].as_strided(shape, strides))
        for compiled, pick_operands in located:
            compiled(*pick_operands(values))
        return pick_result(values)

    tensors = [index for index, x in enumerate(values) if isinstance(x, Tensor)]
    return repeat, [(index, other) for index in tensors if index in returned for other in tensors if index != other]
