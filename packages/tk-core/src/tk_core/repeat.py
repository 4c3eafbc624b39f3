"""A repeated eager call launches its kernels again without running its Python.

What a call allocates and launches, and the checks of TileLang's host code, depend only on plain values and on its
tensors' dtypes, shapes, strides and alignments, unless it copies, fills or reads tensors. So the first call with a set
of these is watched. If it only allocated, viewed and launched, later calls repeat that with their own tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tk_core import kernel, overlap, serving
from tk_core.num_sms import get_limit

_MAX_CALLS = 4096
_PLAIN = int, float, str, torch.dtype, type(None)
_ALLOCATE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Watch(TorchDispatchMode):
    """Sees what a call does beside launching kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.only_allocates = True
        """Whether all that torch did was to allocate tensors and to view them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            self.allocated.append(result)
        elif not func.is_view:
            self.only_allocates = False
        return result


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...] | None]:
    """The arguments, then the items of tuples among them; and the call's key, None if it must not be recorded."""
    values, device = [*args, *kwargs.values()], serving.current_device()
    key: list[Any] = [tuple(kwargs), get_limit(), device]
    try:
        for x in values:
            kind = type(x)
            if (kind is Tensor or kind is Parameter) and x.get_device() == device:
                key.append((x.dtype, x.shape, x.stride(), x.data_ptr() & 15))
            elif isinstance(x, _PLAIN):
                key += kind, x or str(x)  # As a text, -0.0 differs from 0.0.
            elif kind is tuple:
                key += kind, len(x)
                values += x  # The loop reaches these items too.
            else:
                return values, None
    except RuntimeError:  # functorch's tensors have no address, sparse tensors no strides
        return values, None
    return values, tuple(key)


def map_items(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply `function` to x, or, if x is a tuple, to each item of it and of the tuples nested in it."""
    return tuple([map_items(function, y) for y in x]) if type(x) is tuple else function(x)


def _identity(x: Any) -> Any:
    """A tensor's address range and dtype, which any view of the whole tensor shares; for other values, the id."""
    return (x.data_ptr(), overlap.extent(x), x.dtype) if isinstance(x, Tensor) else id(x)


def _repeat_of(
    values: list[Any], recorded: kernel.Recording, allocated: list[Tensor], result: Any
) -> Callable[[list[Any]], Any] | None:
    """Make the function `repeat`, which repeats the recorded launches for another call's arguments, with its result.

    `repeat` returns NotImplemented for what the function refuses: an argument that is written, such as `out`, overlaps
    another, or one is a negative view. The result is None instead of `repeat` if an operand or result can't be traced
    to exactly one tensor, or if an output is no operand of a kernel. Launches name operands by index into one list:
    arguments, constants, allocated tensors, views of these.
    """
    results: list[Any] = []
    map_items(results.append, result)
    arguments = {index: x for index, x in enumerate(values) if isinstance(x, Tensor)}
    outputs = [x for x in results if isinstance(x, Tensor) and not any(x is y for y in arguments.values())]
    if not recorded.launches or any(x.layout is not torch.strided for x in outputs):
        return None
    operands = [x for _, operands in recorded.launches for x in operands]
    constants = [None, *(x for x in operands if not isinstance(x, Tensor))]
    used = set(map(_identity, operands))
    allocated = [x for x in allocated if _identity(x) in used or any(x is y for y in outputs)]
    known = [*values, *constants, *allocated]
    indices = {_identity(x): index for index, x in enumerate(known)}
    tensors = [*arguments.values(), *allocated]
    is_known = indices.keys() >= {*used, *map(_identity, results)}
    is_written = all(_identity(x) in used for x in outputs if x.numel())
    is_unique = len(set(map(_identity, tensors))) == len(tensors)
    is_new = not any(overlap.overlap(x, y) for x in outputs for y in arguments.values())
    if not (is_known and is_written and is_unique and is_new):
        return None
    views: list[tuple[int, torch.Size, tuple[int, ...]]] = []

    def index_of(x: Any) -> int:
        base = indices[_identity(x)]
        if not isinstance(x, Tensor) or (x.shape, x.stride()) == (known[base].shape, known[base].stride()):
            return base
        views.append((base, x.shape, x.stride()))
        return len(known) + len(views) - 1

    launches = [(compiled, map_items(index_of, operands)) for compiled, operands in recorded.launches]
    returned = map_items(index_of, result)
    # Allocating through an empty tensor of the same dtype and device takes less host time than passing both.
    allocations = [(x.new_empty((0,)), x.shape, x.stride()) for x in allocated]
    given = [x for x, given in arguments.items() if any(overlap.overlap(given, y) for y in recorded.written)]
    # Two arguments overlap if x begins less than x's extent before y, and less than y's extent after it; unless they
    # lie beside each other in rows, as they do where they are as far apart as in this call.
    apart = [
        (x, y, -overlap.extent(values[x]), overlap.extent(values[y]), values[x].data_ptr() - values[y].data_ptr())
        for x in given
        for y in arguments
        if x != y
    ]
    # A key does not tell the negative bit, which the imaginary parts of conjugates have; their strides are even.
    maybe_negative = [x for x, given in arguments.items() if given.dtype.is_floating_point and 1 not in given.stride()]

    def repeat(values: list[Any]) -> Any:
        for x, y, before, after, as_recorded in apart:
            if before < (between := values[x].data_ptr() - values[y].data_ptr()) < after and between != as_recorded:
                return NotImplemented
        for x in maybe_negative:
            if values[x].is_neg():
                return NotImplemented
        values += constants
        values += [like.new_empty_strided(shape, strides) for like, shape, strides in allocations]
        values += [values[base].as_strided(shape, strides) for base, shape, strides in views]
        for compiled, operands in launches:
            compiled(*[values[x] for x in operands])
        return map_items(values.__getitem__, returned)

    return repeat


def repeating(function: Callable[..., Any], traced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Let repeated eager calls of a function, whose kernels write all that it returns, skip its Python.

    torch.compile traces `traced` instead.
    """
    calls: dict[tuple[Any, ...] | None, Callable[[list[Any]], Any] | None] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if traced is not None and is_compiling():
            return traced(*args, **kwargs)
        # A tensor does not show its tangent of forward mode.
        if not serving.kernels_only or _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return function(*args, **kwargs)
        values, key = _read(args, kwargs)
        if (repeat := calls.get(key)) is not None and (result := repeat(values)) is not NotImplemented:
            return result
        if key is None or key in calls or kernel.recording():
            return function(*args, **kwargs)
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        with kernel.recorded_launches() as recorded, _Watch() as watch:
            result = function(*args, **kwargs)
        calls[key] = _repeat_of(values, recorded, watch.allocated, result) if watch.only_allocates else None
        return result

    return call
