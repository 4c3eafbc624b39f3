"""@op: makes a public function an op, whose kernels serve CUDA tensors and whose reference serves all others.

The function checks its arguments, allocates its results and launches its kernels, in this order:

    @op
    def double(x: Tensor) -> Tensor:
        check.tensor("x", x, (torch.float32,), ("num_tokens", "hidden"))
        out = new(x.new_empty, x.shape)
        if launching(out):
            double_kernel(x.shape[1], get_arch(x.device))(x, out)
        return out

`launching` is false where no kernel is to be launched: under torch.compile and for fake, meta and CPU tensors. There
the function only checks and allocates, and a torch operator, made from the function's signature, stands in the graph or
runs the reference. Where that operator runs on a GPU, it calls the function again, and `new` returns the results that
the operator was given.
"""

import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib.metadata import entry_points
from operator import is_
from types import MappingProxyType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch._C import _is_fwd_grad_enabled, _len_torch_dispatch_stack
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from tk_core import check, env, kernel, overlap, repeat, serving
from tk_core.arch import UnsupportedArchError, get_arch
from tk_core.compat import CompilationForbiddenError
from tk_core.flat_operator import FlatOperator, first_tensor, tensors

Function = TypeVar("Function", bound=Callable[..., Any])

_libraries: dict[str, torch.library.Library] = {}
# Types of the arguments of earlier calls that had no tensor subclass among them: such calls need no dispatcher.
_plain: set[tuple[type, ...]] = set()


@dataclass
class _Call:
    """What `new` and `launching` go by while an op's function runs."""

    check: Callable[[tuple[Any, ...]], None] | None = None
    """Called with what is written before kernels are launched; None where none are."""
    given: Iterator[Tensor] | None = None
    """Results that `new` returns; None where it allocates."""
    made: list[Tensor] | None = None
    """What `new` has allocated, if somebody asks."""


class _Current(threading.local):
    call = _Call()


_current = _Current()


@contextmanager
def _within(call: _Call) -> Iterator[_Call]:
    before, _current.call = _current.call, call
    try:
        yield call
    finally:
        _current.call = before


def new(allocate: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A result of an op to be written: `allocate(*args, **kwargs)`, or the one that the op's operator was given.

    An op calls it for each of its results, in the order in which it returns them.
    """
    if is_compiling():
        return allocate(*args, **kwargs)
    if _current.call.given is not None:
        return next(_current.call.given)
    result = allocate(*args, **kwargs)
    if _current.call.made is not None:
        _current.call.made.append(result)
    return result


def given_or_new(
    name: str, given: Tensor | None, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """A result that a caller may give in the argument `name`: `given`, checked, or by `new` one on `like`'s device.

    It is contiguous and of this shape and dtype, by default that of `like`.
    """
    dtype = dtype or like.dtype
    if given is None:
        return new(like.new_empty, shape, dtype=dtype)
    check.tensor(name, given, (dtype,), tuple(shape), device=like.device)
    return given


def launching(*written: Tensor | Sequence[Tensor] | None) -> bool:
    """Whether the op that calls this is to launch its kernels, which write these tensors; False if all are empty.

    Raises ValueError if an argument that is written shares memory with another argument, or with itself.
    """
    if is_compiling() or _current.call.check is None or not any(x.numel() for x in tensors(written)):
        return False
    _current.call.check(written)
    return True


def _are_plain(args: Sequence[Any]) -> bool:
    kinds = tuple(map(type, args))
    if kinds in _plain:
        return True
    plain = all(kind in (Tensor, Parameter) or not issubclass(kind, Tensor) for kind in kinds)
    if list in kinds or tuple in kinds:
        # Not added to _plain: at the next call they may hold tensors of a subclass.
        return plain and all(_are_plain(arg) for arg in args if type(arg) in (list, tuple))
    if plain:
        _plain.add(kinds)
    return plain


def _lost(x: Tensor) -> str | None:
    """The derivative by x that a call of an op drops, if any: of ordinary reverse mode only with TK_DEBUG."""
    if not x.is_floating_point():
        return None
    if torch.is_grad_enabled() and x.requires_grad and (env.debug() or is_gradtrackingtensor(x)):
        return "gradient of {}"
    is_forward = forward_ad._current_level >= 0 and _is_fwd_grad_enabled()
    is_dual = is_forward and forward_ad.unpack_dual(x).tangent is not None
    return "tangent of {} (no op has a forward mode)" if is_dual else None


def _what_differentiates(package: str, name: str) -> str:
    """The end of an error message: what to call instead of the op `name` to get a gradient."""
    stem = name.removesuffix("_fwd")
    own = importlib.import_module(package) if importlib.util.find_spec(package) else None
    for entry in entry_points(group="tk_core.differentiable"):
        functions = entry.load()
        for public in (name, stem):
            # Some of its names are the op's package's own functions.
            if public in functions.__all__ and getattr(functions, public) is not getattr(own, public, None):
                return f"{entry.value}.{public} is differentiable"
    if own is not None and f"{stem}_bwd" in own.__all__:
        return f"{package}.{stem}_bwd computes it"
    return "if none is wanted, detach the argument"


def _map_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """x, or what it is with `function` applied to each of its tensors, if that changes any."""
    if isinstance(x, (tuple, list)):
        mapped = [_map_tensors(function, y) for y in x]
        return x if all(map(is_, mapped, x)) else type(x)(mapped)
    return function(x) if type(x) in (Tensor, Parameter) and x.layout is torch.strided else x


def _aligned(x: Tensor) -> Tensor:
    """x if its address is a multiple of 16 bytes, as kernels' wide accesses need it, else a copy with its strides."""
    if x.data_ptr() % 16 == 0:
        return x
    # Nothing can be copied into a tensor that repeats elements, and a clone drops the gaps between columns.
    return x.clone() if 0 in x.stride() else x.new_empty_strided(x.shape, x.stride()).copy_(x)


def _with_usual_strides(x: Tensor) -> Tensor:
    """x, if contiguous, with a new one's strides: in dimensions of size 0 or 1 any stride counts as contiguous."""
    if not x.is_contiguous():
        return x
    usual = torch.empty(x.shape, dtype=x.dtype, device="meta").stride()
    return x if x.stride() == usual else x.as_strided(x.shape, usual)


class Op:
    """What `@op` knows of a function, and the ways in which it serves a call. The attribute `op` of the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        writes: tuple[str, ...],
        aligned: tuple[str, ...] | None,
        in_place: Mapping[str, tuple[str, ...]],
        reference: str | Callable[..., Any] | None,
        min_sm: int,
    ) -> None:
        self.function = function
        self.package = function.__module__.partition(".")[0]
        short_name = function.__name__.lstrip("_")
        self.name = f"{self.package}.{short_name}"
        self.min_sm = min_sm
        parameters = inspect.signature(function).parameters
        self._names = list(parameters)
        self._written = tuple(map(self._names.index, writes))
        self._to_align = [aligned is None or name in aligned for name in self._names]
        self._in_place = {(output, other) for output, others in in_place.items() for other in others}
        self._reference = reference or function.__name__
        self._ready_devices: set[torch.device] = set()
        # bind(*args, **kwargs) gives the arguments in the order of the parameters, defaults included.
        self.bind = eval(f"lambda {_declared(parameters.values())}: [{', '.join(self._names)}]")
        self.bind.__defaults__, self.bind.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        self.bind.__name__ = self.bind.__qualname__ = function.__name__
        self._keywords = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        library = _libraries.get(self.package)
        if library is None:
            library = _libraries[self.package] = torch.library.Library(self.package, "FRAGMENT")
        self.operator = FlatOperator(library, function, short_name, writes)
        library.impl(short_name, self._on_cpu, "CPU")
        library.impl(short_name, self._on_cuda, "CUDA")
        self.repeated = repeat.repeating(self._serve_given)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The function that defines the op's results."""
        if not isinstance(self._reference, str):
            return self._reference
        place, _, name = self._reference.rpartition(".")
        module = ".".join(filter(None, (self.package, "reference", place)))
        return getattr(importlib.import_module(module), name)

    def _apply(self, function: Callable[..., Any], call: Sequence[Any]) -> Any:
        num_keywords = len(self._keywords)
        if not num_keywords:
            return function(*call)
        return function(*call[:-num_keywords], **dict(zip(self._keywords, call[-num_keywords:])))

    def _for_kernels(self, call: Sequence[Any]) -> list[Any]:
        """The arguments as kernels can take them, some of their tensors copied."""
        return [_map_tensors(_aligned, x) if to_align else x for x, to_align in zip(call, self._to_align)]

    def _fresh(self, result: Any, call: Sequence[Any]) -> list[Tensor]:
        """The tensors of a result that are no arguments."""
        given = tensors(call)
        return [x for x in tensors([result]) if not any(x is y for y in given)]

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Check and allocate, then call the operator: what torch.compile traces."""
        result, call = self.function(*args, **kwargs), self.bind(*args, **kwargs)
        self.operator(call, self._fresh(result, call))
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve an eager call."""
        try:
            call = self.bind(*args, **kwargs)
        except TypeError:  # Let the function itself say so.
            return self.function(*args, **kwargs)
        first = first_tensor(call)
        if first is not None and kernel.capturing():
            self._check_arch(first.device)
            with _within(_Call(lambda _: None)):
                return self._apply(self.function, self._for_kernels(call))
        is_seen = (
            _len_torch_dispatch_stack() > (kernel.recording() is not None)
            or peek_interpreter_stack() is not None
            or forward_ad._current_level >= 0
            or not _are_plain(call)
        )
        if first is None or is_seen or serving.uses_reference(first.device):
            return self._dispatch(call)
        return self._serve(call, None)

    def _dispatch(self, call: list[Any]) -> Any:
        """Check and allocate, then let torch choose what the operator does."""
        if peek_interpreter_stack() is not None:
            self._refuse_batches(call)
        with _within(_Call(made=[])) as allocating:
            result = self._apply(self.function, call)
        fresh = self._fresh(result, call)
        if not all(x is y for x, y in zip(allocating.made, fresh)) or len(allocating.made) != len(fresh):
            raise AssertionError(f"{self.name}: makes its results in another order than it returns them")
        self._check_derivatives(call, [fresh, *(call[index] for index in self._written)])
        self.operator(call, fresh)
        return result

    def _check_derivatives(self, call: Sequence[Any], written: Sequence[Any]) -> None:
        """Raise RuntimeError if the call would drop a gradient or a tangent: no op builds an autograd graph."""
        for argument, x in overlap.named(self._names, call):
            lost = _lost(x)
            if lost and any(y.is_floating_point() for y in tensors(written)):
                package, _, name = self.name.partition(".")
                instead = _what_differentiates(package, name)
                raise RuntimeError(f"{self.name}: drops the {lost.format(argument)}; {instead}")

    def _refuse_batches(self, call: Sequence[Any]) -> None:
        """Raise TypeError if an argument is a batch of torch.func.vmap, perhaps inside of other wrappers."""
        for argument, x in overlap.named(self._names, call):
            while is_functorch_wrapped_tensor(x):
                if is_batchedtensor(x):
                    got = "a batch of torch.func.vmap, which is not supported; call it for each element"
                    raise TypeError(f"{argument}: expected a torch.Tensor, got {got}")
                x = get_unwrapped(x)

    def _check_memory(self, call: Sequence[Any], results: list[Tensor]) -> None:
        names, args = [*self._names, "results"], [*call, results]
        overlap.check_written(names, args, [*self._written, len(call)], self._in_place)

    def _on_cpu(self, *flat: Any) -> None:
        *flat, results = flat
        call = self.operator.arguments(flat)
        self._check_memory(call, results)
        self._refer(call, results)

    def _on_cuda(self, *flat: Any) -> None:
        *flat, results = flat
        call = self.operator.arguments(flat)
        if serving.uses_reference(first_tensor(call).device):
            self._check_memory(call, results)
            self._refer(call, results)
        else:
            self.repeated(*call, *results)

    def _refer(self, call: Sequence[Any], results: list[Tensor]) -> None:
        """Let the reference write the results. Like a kernel, it runs without autograd and autocast."""
        device = first_tensor(call).device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            found = self._fresh(self._apply(self.reference, call), call)
            for out, x in zip(results, found, strict=True):
                out.copy_(x)

    def _check_arch(self, device: torch.device) -> None:
        arch = get_arch(device)
        if arch.sm < self.min_sm:
            raise UnsupportedArchError(self.name, arch.name, f"sm_{self.min_sm} or newer")

    def _serve_given(self, *call_and_results: Any) -> None:
        num_arguments = len(self._names)
        self._serve(list(call_and_results[:num_arguments]), list(call_and_results[num_arguments:]))

    def _serve(self, call: list[Any], given: list[Tensor] | None) -> Any:
        """Run the function with its kernels on the GPU of its first tensor."""
        device = first_tensor(call).device
        if device not in self._ready_devices:
            self._check_arch(device)
            self._ready_devices.add(device)
            serving.look_up()
        # A kernel's host code makes the tensors' device current and does not restore the one before.
        is_current = device.index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(device):
            passed = self._for_kernels(call)
            into = given and _map_tensors(_aligned, given)
            try:
                return self._launch(call, given, passed, into)
            except CompilationForbiddenError as error:
                raise CompilationForbiddenError(f"{self.name}: {error}") from error
            except RuntimeError:
                # TileLang's host code rejects unusual strides of size-0 and size-1 dimensions before it launches.
                usual = _map_tensors(_with_usual_strides, passed)
                if all(map(is_, usual, passed)):
                    raise
                return self._launch(call, given, usual, into)

    def _launch(self, call: list[Any], given: list[Tensor] | None, passed: list[Any], into: list[Tensor] | None) -> Any:
        """Call the function and its kernels with `passed` for the arguments `call`, `into` for results `given`."""

        def check(written: Sequence[Any]) -> None:
            self._check_memory(call, given or [])
            if env.debug() and given is None:
                self._check_derivatives(call, written)

        with _within(_Call(check, None if into is None else iter(into))):
            result = self._apply(self.function, passed)
        if into is given and all(map(is_, passed, call)):
            return result
        written = [call[index] for index in self._written]
        for x, y in zip(tensors([written, given]), tensors([[passed[index] for index in self._written], into])):
            if x.data_ptr() != y.data_ptr():
                x.copy_(y)
        originals = {id(y): x for x, y in zip(tensors([call, given]), tensors([passed, into]))}
        return repeat.map_items(lambda x: originals.get(id(x), x), result)


def _declared(parameters: Any) -> str:
    """The names of parameters as in a `def`, without annotations; a default stands as None."""
    parts, is_keyword = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        parts.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}=None")
    return ", ".join(parts)


@overload
def op(function: Function) -> Function: ...


@overload
def op(
    *,
    writes: tuple[str, ...] = (),
    aligned: tuple[str, ...] | None = None,
    in_place: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    reference: str | Callable[..., Any] | None = None,
    min_sm: int = 80,
) -> Callable[[Function], Function]: ...


def op(
    function: Any = None,
    *,
    writes: tuple[str, ...] = (),
    aligned: tuple[str, ...] | None = None,
    in_place: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    reference: str | Callable[..., Any] | None = None,
    min_sm: int = 80,
) -> Any:
    """Make a function an op: see the top of this file for its form, docs/architecture.md for the way of a call.

    The function's reference has its name and its arguments, and returns new tensors in the order of the results; an
    argument that the op writes, it writes too. It runs for CPU tensors, and for CUDA tensors under the reference
    backend. The op becomes the torch operator `package::name`, opaque under torch.compile, with arguments read off the
    annotations: tensors, pairs and lists of tensors, numbers, strings, dtypes, and tuples of ints.

    Kernels get aligned tensors: an argument whose address is no multiple of 16 bytes is copied, and copied back if the
    op writes it. A repeated call skips the function's Python if all that this did was to check, allocate and launch.

    Args:
        function: The function, if the decorator is used without arguments.
        writes: Parameters whose tensors the op writes, such as `out`. When the op runs, under torch.compile too, such a
            tensor must share no memory with another argument, or the call raises ValueError before anything is written.
        aligned: Parameters whose tensors kernels need aligned; None for all.
        in_place: {"d": ("c",)} if d, which is written, may be c itself: the same elements at the same address.
        reference: The reference, or its name below the package's `reference`, "folder.file.f", if it is not the op's.
        min_sm: Compute capability × 10 of the oldest GPU that the kernels run on.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        made = Op(function, writes, aligned, in_place, reference, min_sm)
        call = wraps(function)(repeat.repeating(made, made.trace))
        call.op = made
        return call

    return decorate if function is None else decorate(function)
