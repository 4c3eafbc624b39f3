"""@replayable: the second eager call with the same kind of arguments checks and looks up nothing again.

A public function spends microseconds of Python on checks, configuration and look-ups whose outcome depends on dtypes,
shapes, strides, alignment, device and plain values alone. The first call with given ones notes what it allocated and
which compiled kernels it launched with what. Later ones allocate and launch the same. What TileLang's host code checks
is checked again every time.

On an H200 machine this takes 1 to 2 µs of host time a call where the function itself takes 3 to 8.
"""

import threading
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.nn import Parameter

from tk_core import check, kernel, op
from tk_core.num_sms import get_limit

Function = TypeVar("Function", bound=Callable[..., Any])

_Reader = Callable[[tuple[Any, ...], dict[str, Any]], tuple[list[Any], tuple[Any, ...]] | None]

_MAX_CALLS = 4096
_KINDS = (Tensor, Parameter, int, bool, float, str, tuple, torch.dtype, type(None))


class _Allocation(NamedTuple):
    """A tensor that the function allocates: an output or a workspace."""

    like: Tensor
    """Empty, of its dtype and device: asking a tensor for a new one costs less than naming both."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Call(NamedTuple):
    """What one kind of call does. Its values: the arguments, allocations, views of these, constants."""

    allocations: tuple[_Allocation, ...]
    views: tuple[tuple[int, tuple[int, ...]], ...]
    """Values of which a kernel takes a view of another shape, and that shape."""
    constants: tuple[Any, ...]
    launches: tuple[tuple[Callable[..., None], Callable[[Any], Any]], ...]
    """Compiled kernels, each with what picks its arguments from the values."""
    result: Callable[[Any], Any]
    given: tuple[int, ...]
    """Arguments that are results, such as `out`: where they overlap others, the function has to judge."""


class _Reading(NamedTuple):
    """Calls whose arguments have the same types and keywords."""

    read: _Reader
    calls: dict[tuple[Any, ...], _Call | None]


def _kinds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The types of the arguments; of a tuple that comes first, as a quantized pair does, those of what is in it."""
    values = [*args, *kwargs.values()]
    kinds: list[Any] = [type(x) for x in values]
    if values and kinds[0] is tuple:
        kinds[0] = tuple(type(x) for x in values[0])
    return kinds


def _integers(x: tuple[Any, ...]) -> tuple[int, ...]:
    """x itself; what else a tuple may hold is no key, or the same as another."""
    if {*map(type, x)} != {int}:
        raise KeyError(x)
    return x


def _reads_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The reader for arguments of which one is of another kind, a subclass of Tensor perhaps."""


def _compile_reader(kinds: list[Any], names: tuple[str, ...]) -> _Reader:
    """What reads arguments of these types, the last of them given by these names.

    It returns the arguments, flat, and all that a call depends on: device, limit of multiprocessors, of a tensor dtype,
    shape, strides and alignment, of anything else its value. For arguments of other types or names it returns None.

    It is compiled from source, in which nothing is left to loop over: 0.4 to 0.6 µs less for six arguments, on hosts
    where all of a remembered call takes 3 beside its launch and allocations.
    """
    num_args = len(kinds) - len(names)
    tests = [f"len(args) == {num_args}", f"len(kwargs) == {len(names)}"]
    values: list[tuple[str, type]] = []
    sources = [f"args[{i}]" for i in range(num_args)] + [f"kwargs[{name!r}]" for name in names]
    for source, kind in zip(sources, kinds, strict=True):
        if isinstance(kind, tuple):
            tests.append(f"type({source}) is tuple and len({source}) == {len(kind)}")
            values += [(f"{source}[{i}]", inner) for i, inner in enumerate(kind)]
        else:
            values.append((source, kind))
    if not values or values[0][1] not in (Tensor, Parameter):
        return _reads_nothing
    if not all(kind in _KINDS or issubclass(kind, IntEnum) for _, kind in values):
        return _reads_nothing

    scope: dict[str, Any] = {"get_limit": get_limit, "integers": _integers}
    parts = ["x0.get_device()", "get_limit()"]
    for i, (source, kind) in enumerate(values):
        scope[f"kind{i}"] = kind
        tests.append(f"type(x{i} := {source}) is kind{i}")
        if kind is Tensor or kind is Parameter:
            parts.append(f"x{i}.dtype, x{i}.shape, x{i}.is_contiguous() or x{i}.stride(), x{i}.data_ptr() & 15")
        else:
            parts.append(f"integers(x{i})" if kind is tuple else f"x{i}")
    source = f"""
def read(args, kwargs):
    try:
        if {" and ".join(tests)}:
            return [{", ".join(f"x{i}" for i in range(len(values)))}], ({", ".join(parts)})
    except (KeyError, RuntimeError):  # other names, a tuple of something else; functorch's tensors have no address
        pass
    return None
"""
    exec(source, scope)
    return scope["read"]


def _is_reshaped(x: Tensor, y: Tensor) -> bool:
    """Whether x is y.view(x.shape), or of the same address, size and dtype."""
    same_place = x.data_ptr() == y.data_ptr() and x.numel() == y.numel() and x.dtype == y.dtype
    return same_place and x.is_contiguous() and y.is_contiguous()


def _picker(indices: list[int]) -> Callable[[Any], Any]:
    if len(indices) == 1:
        (only,) = indices
        return lambda values: (values[only],)
    return itemgetter(*indices)


_recording = threading.local()


def new_workspace(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on the device of `like`, and of its dtype if none is given, for one kernel to leave to the next.

    Nothing but the kernels of one call may write or read it: then `@replayable` remembers the call.
    """
    workspace = like.new_empty(shape, dtype=dtype)
    if not is_compiling() and (workspaces := getattr(_recording, "workspaces", None)) is not None:
        workspaces.append(workspace)
    return workspace


def _record(function: Callable[..., Any], args: Any, kwargs: Any, flat: list[Any]) -> tuple[Any, _Call | None]:
    inputs = [x for x in flat if isinstance(x, Tensor)]
    workspaces: list[Tensor] = []
    _recording.workspaces = workspaces
    try:
        with kernel.recorded_launches() as launched:
            result = function(*args, **kwargs)
    finally:
        _recording.workspaces = None
    leaves = result if isinstance(result, tuple) else (result,)
    outputs = [x for x in leaves if isinstance(x, Tensor) and not any(x is y for y in inputs)]
    allocated = [*outputs, *workspaces]
    values = [*flat, *allocated]
    index_of = {id(x): index for index, x in enumerate(values) if isinstance(x, Tensor)}
    # Of two arguments that are one tensor, nobody can tell which a kernel was given.
    if not launched or len(index_of) != len(inputs) + len(allocated):
        return result, None
    if any(x is not None and id(x) not in index_of for x in leaves):
        return result, None
    views: list[tuple[int, tuple[int, ...]]] = []
    for x in (x for _, arguments in launched for x in arguments if isinstance(x, Tensor) and id(x) not in index_of):
        bases = [index for index, y in enumerate(values) if isinstance(y, Tensor) and _is_reshaped(x, y)]
        if len(bases) != 1:
            return result, None
        index_of[id(x)] = len(values) + len(views)
        views.append((bases[0], tuple(x.shape)))
    written = {index_of[id(x)] for _, arguments in launched for x in arguments if isinstance(x, Tensor)}
    written.update(index for index, _ in views)
    if any(x.numel() and index_of[id(x)] not in written for x in outputs):
        return result, None

    values += [values[index].view(shape) for index, shape in views]
    num_before = len(values)

    def index(x: Any) -> int:
        if isinstance(x, Tensor):
            return index_of[id(x)]
        values.append(x)
        return len(values) - 1

    launches = tuple((compiled, _picker([index(x) for x in arguments])) for compiled, arguments in launched)
    picked = _picker([index(x) for x in leaves]) if isinstance(result, tuple) else itemgetter(index(result))
    return result, _Call(
        allocations=tuple(_Allocation(x.new_empty((0,)), tuple(x.shape), x.stride()) for x in allocated),
        views=tuple(views),
        constants=tuple(values[num_before:]),
        launches=launches,
        result=picked,
        given=tuple(index for index, x in enumerate(flat) if any(x is y for y in leaves if isinstance(y, Tensor))),
    )


def _overlaps(given: tuple[int, ...], values: list[Any]) -> bool:
    """Whether one of the arguments that are results overlaps another argument."""
    return any(
        index != other and isinstance(x, Tensor) and check.overlap(values[index], x)
        for index in given
        for other, x in enumerate(values)
    )


def _replay(call: _Call, values: list[Any]) -> Any:
    """Do it with other arguments, which `values` holds."""
    for like, shape, strides in call.allocations:
        # 0.3 µs less than new_empty(shape), also where the strides are the usual ones.
        values.append(like.new_empty_strided(shape, strides))
    for index, shape in call.views:
        values.append(values[index].view(shape))
    values += call.constants
    for compiled, arguments in call.launches:
        compiled(*arguments(values))
    return call.result(values)


def replayable(function: Function) -> Function:
    """Let repeated eager calls of a public function on a GPU skip its Python.

    What the function launches must depend on nothing but its arguments' metadata and plain values, and it must leave
    every element of its outputs to its kernels; `new_workspace` makes what these leave to each other. A call whose
    outputs or launches are of any other kind (views, copies, no launch at all) is not remembered, and runs as it is.
    """
    readings: dict[tuple[Any, ...], _Reading] = {}
    latest = _Reading(_reads_nothing, {})
    lock = threading.Lock()

    def reading_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reading:
        kinds, names = _kinds(args, kwargs), tuple(kwargs)
        reading = readings.get((*kinds, names))
        if reading is None:
            reading = readings.setdefault((*kinds, names), _Reading(_compile_reader(kinds, names), {}))
        return reading

    @wraps(function)
    def replay(*args: Any, **kwargs: Any) -> Any:
        nonlocal latest
        if is_compiling() or not op.kernels_only or _len_torch_dispatch_stack():
            return function(*args, **kwargs)
        read, calls = latest
        found = read(args, kwargs)
        if found is None:
            latest = read, calls = reading_for(args, kwargs)
            found = read(args, kwargs)
            if found is None:
                return function(*args, **kwargs)
        values, key = found
        device = key[0]
        if device < 0:
            return function(*args, **kwargs)
        call = calls.get(key)
        if call is not None and device == op.current_device() and not (call.given and _overlaps(call.given, values)):
            try:
                return _replay(call, values)
            except Exception:
                # TileLang's host code refused a tensor, before it launched: let the function say what is wrong.
                return function(*args, **kwargs)
        if key in calls:
            return function(*args, **kwargs)
        with lock:
            result, noted = _record(function, args, kwargs, values)
            if len(calls) >= _MAX_CALLS:
                calls.clear()
            calls[key] = noted
        return result

    return replay  # type: ignore[return-value]
