"""@replayable: a repeated eager call launches its kernels again without running the function's Python.

What such a function allocates and launches depends on the metadata of its tensors and on plain values alone. The first
call with given ones is recorded (`tk_core.recording`), later ones do the same with their own tensors. TileLang's host
code checks no more than that, so it accepts these as it accepted the first.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.nn import Parameter

from tk_core import check, op
from tk_core.num_sms import get_limit
from tk_core.recording import Repeat, record, workspaces
from tk_core.recording import new_workspace as new_workspace

Function = TypeVar("Function", bound=Callable[..., Any])

_MAX_CALLS = 4096
_PLAIN = frozenset((int, bool, str, torch.dtype, type(None)))


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...] | None]:
    """The arguments, and after them what is in tuples; and the key of the call: all that its launches depend on.

    The key is None if an argument is neither a plain tensor nor a plain value.
    """
    values = [*args, *kwargs.values()] if kwargs else [*args]
    key: list[Any] = [tuple(kwargs), get_limit(), op.current_device()]
    try:
        for x in values:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                key.append((x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device()))
            elif kind in _PLAIN:
                key += kind, x
            elif kind is float:
                key += kind, x or str(x)  # 0.0 == -0.0
            elif kind is tuple:
                key += kind, len(x)
                values += x  # The loop goes on to these.
            elif issubclass(kind, IntEnum):
                key += kind, x
            else:
                return values, None
    except RuntimeError:  # functorch's tensors have no address, sparse ones no strides
        return values, None
    return values, tuple(key)


def replayable(function: Function) -> Function:
    """Let repeated eager calls of a public function on a GPU skip its Python.

    What the function launches must depend on nothing but its arguments' metadata and plain values, and it must leave
    every element of its outputs to its kernels; `new_workspace` makes what these leave to each other. A call whose
    outputs or launches are of any other kind (views, copies, no launch at all) is not remembered, and runs as it is.
    """
    calls: dict[tuple[Any, ...] | None, Repeat | None] = {}

    @wraps(function)
    def replay(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not op.kernels_only or _len_torch_dispatch_stack() or workspaces.get() is not None:
            return function(*args, **kwargs)
        values, key = _read(args, kwargs)
        if (call := calls.get(key)) is not None:
            repeat, pairs = call
            if not pairs or not any(check.overlap(values[index], values[other]) for index, other in pairs):
                return repeat(values)
        if key is None or key in calls:
            return function(*args, **kwargs)
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        result, calls[key] = record(function, args, kwargs, values)
        return result

    return replay  # type: ignore[return-value]
