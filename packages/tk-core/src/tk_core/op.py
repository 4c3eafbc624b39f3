"""@op: makes a kernel launch a torch operator, with a reference for CPU tensors; eager calls bypass the dispatcher."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType, SimpleNamespace
from typing import Any

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

from tk_core import env, kernel, overlap, serving
from tk_core.arch import UnsupportedArchError, get_arch
from tk_core.compat import CompilationForbiddenError
from tk_core.serving import backend as backend
from tk_core.serving import uses_reference

_libraries: dict[str, torch.library.Library] = {}
# Argument types of earlier calls that had no tensor subclass among them: such calls need no dispatcher.
_plain: set[tuple[type, ...]] = set()


def _are_plain(args: tuple[Any, ...]) -> bool:
    kinds = tuple(map(type, args))
    plain = all(kind in (Tensor, Parameter) or not issubclass(kind, Tensor) for kind in kinds)
    if list in kinds:
        # Not added to _plain: at the next call the list may hold tensors of a subclass.
        return plain and all(_are_plain(tuple(arg)) for arg in args if type(arg) is list)
    if plain:
        _plain.add(kinds)
    return plain


def _with_usual_strides(x: Any) -> Any:
    """Give contiguous tensors the strides of new ones: in dimensions of size 0 or 1 any stride counts as contiguous."""
    if isinstance(x, list):
        usual = [_with_usual_strides(y) for y in x]
        return x if all(new is old for new, old in zip(usual, x)) else usual
    if not isinstance(x, Tensor) or not x.is_contiguous():
        return x
    usual = torch.empty(x.shape, dtype=x.dtype, device="meta").stride()
    return x if x.stride() == usual else x.as_strided(x.shape, usual)


def _stand_in(
    launch: Callable[..., None],
    mutates: tuple[str, ...],
    reference: str | Callable[..., Any],
    translate: Callable[[Any], dict[str, Any]] | None,
) -> Callable[..., None]:
    """Wrap the reference to take the operator's arguments. Like a kernel, it runs without autograd and autocast."""
    names = tuple(inspect.signature(launch).parameters)

    @cache
    def find() -> tuple[Callable[..., Any], list[str]]:
        """The reference, and the names of its parameters that are also arguments of the operator."""
        found = reference
        if isinstance(reference, str):
            package, _, beside = launch.__module__.partition(".")
            place, _, name = reference.rpartition(".")
            found = getattr(importlib.import_module(f"{package}.reference.{place or beside}"), name)
        return found, [name for name in inspect.signature(found).parameters if name in names]

    def run(*args: Any) -> None:
        function, shared = find()
        call = dict(zip(names, args))
        given = {name: call[name] for name in shared}
        if translate is not None:
            given |= translate(SimpleNamespace(**call))
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            results = _flat([function(**given)])
            for out, result in zip(_flat(call[name] for name in mutates), results):
                if result is not None and out is not None and result is not out:
                    out.copy_(result)

    return run


def _nothing(*_: Any) -> None:
    """Fake implementation. It does nothing, because an op allocates no outputs: it only writes into its arguments."""


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values in order, with nested lists and tuples flattened."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists too."""
    return (value for value in _flat(values) if isinstance(value, Tensor))


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


def _lost(x: Tensor) -> str | None:
    """The derivative by x that a call of an op drops, if any: of ordinary reverse mode only with TK_DEBUG."""
    if not x.is_floating_point():
        return None
    if torch.is_grad_enabled() and x.requires_grad and (env.debug() or is_gradtrackingtensor(x)):
        return "gradient of {}"
    is_forward = forward_ad._current_level >= 0 and _is_fwd_grad_enabled()
    is_dual = is_forward and forward_ad.unpack_dual(x).tangent is not None
    return "tangent of {} (no op has a forward mode)" if is_dual else None


class Op:
    """A torch operator that writes its results into tensors passed as arguments. Made by `@op`."""

    def __init__(
        self,
        name: str,
        launch: Callable[..., None],
        mutates: tuple[str, ...],
        in_place: Mapping[str, tuple[str, ...]],
        stand_in: Callable[..., None],
        min_sm: int,
    ) -> None:
        namespace, _, short_name = name.partition("::")
        self.name = name
        self.launch = launch
        self._names = list(inspect.signature(launch).parameters)
        self._written = frozenset(map(self._names.index, mutates))
        self._in_place = {(output, other) for output, others in in_place.items() for other in others}
        self.reference = stand_in
        self.min_sm = min_sm
        self._ready_devices: set[torch.device] = set()
        self.__doc__ = launch.__doc__
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        schema = torch.library.infer_schema(launch, mutates_args=mutates)
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        library.define(short_name + schema, tags=tags)
        library.impl(short_name, self._on_cuda, "CUDA")
        library.impl(short_name, self._on_cpu, "CPU")
        library.impl(short_name, _nothing, "Meta")
        self._overload = getattr(getattr(torch.ops, namespace), short_name).default

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def _check_arch(self, device: torch.device) -> None:
        arch = get_arch(device)
        if arch.sm < self.min_sm:
            raise UnsupportedArchError(self.name, arch.name, f"sm_{self.min_sm} or newer")

    def _check_derivatives(self, args: tuple[Any, ...]) -> None:
        """Raise RuntimeError if the call would drop a gradient or a tangent: no op builds an autograd graph."""
        for argument, x in overlap.named(self._names, args):
            lost = _lost(x)
            if lost and any(y.is_floating_point() for y in _tensors(args[index] for index in self._written)):
                package, _, name = self.name.removesuffix("_out").partition("::")
                lost, instead = lost.format(argument), _what_differentiates(package, name)
                raise RuntimeError(f"{package}.{name}: drops the {lost}; {instead}")

    def _refuse_batches(self, args: tuple[Any, ...]) -> None:
        """Raise TypeError if an argument is a batch of torch.func.vmap, perhaps inside of other wrappers."""
        for argument, x in overlap.named(self._names, args):
            while is_functorch_wrapped_tensor(x):
                if is_batchedtensor(x):
                    got = "a batch of torch.func.vmap, which is not supported; call it for each element"
                    raise TypeError(f"{argument}: expected a torch.Tensor, got {got}")
                x = get_unwrapped(x)

    def _dispatch(self, args: tuple[Any, ...]) -> None:
        if peek_interpreter_stack() is not None:
            self._refuse_batches(args)
        self._check_derivatives(args)
        self._overload(*args)

    def _check_memory(self, args: tuple[Any, ...]) -> None:
        overlap.check_written(self._names, args, self._written, self._in_place)

    def _on_cpu(self, *args: Any) -> None:
        self._check_memory(args)
        self.reference(*args)

    def _on_cuda(self, *args: Any) -> None:
        self._check_memory(args)
        device = args[0].device
        if uses_reference(device):
            self.reference(*args)
            return
        if device not in self._ready_devices:
            self._check_arch(device)
            self._ready_devices.add(device)
        if device.index == torch.cuda.current_device():
            self._launch(args)
        else:
            # The kernel's host code makes the tensors' device current and does not restore the one before.
            with torch.cuda.device(device):
                self._launch(args)

    def _launch(self, args: tuple[Any, ...]) -> None:
        try:
            self.launch(*args)
        except CompilationForbiddenError as error:
            raise CompilationForbiddenError(f"{self.name}: {error}") from error
        except RuntimeError:
            # TileLang's host code rejects unusual strides of size-0 and size-1 dimensions before it launches: retry.
            usual = tuple(map(_with_usual_strides, args))
            if all(new is old for new, old in zip(usual, args)):
                raise
            self.launch(*usual)

    def __call__(self, *args: Any) -> None:
        """Run the operator on the device of its first argument, which is a tensor.

        Raises ValueError before it writes anything if a tensor that it writes shares memory with another argument.
        An eager call raises RuntimeError if it would drop a derivative of torch.func or of forward mode, and with
        TK_DEBUG=1 if it would drop any gradient.
        """
        if is_compiling():
            self._overload(*args)
            return
        if kernel.capturing():
            self._check_arch(args[0].device)
            self.launch(*args)
            return
        if _len_torch_dispatch_stack() or peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            self._dispatch(args)
            return
        kinds = tuple(map(type, args))
        if kinds not in _plain and not _are_plain(args):
            self._dispatch(args)
            return
        first = args[0]
        if not first.is_cuda:
            self._dispatch(args)
        elif serving.kernels_only and serving._one_device and first.device in self._ready_devices:
            self._check_memory(args)
            self._launch(args)
        else:
            if env.debug():
                self._check_derivatives(args)
            self._on_cuda(*args)
            serving.look_up()


def op(
    name: str,
    *,
    mutates: tuple[str, ...],
    reference: str | Callable[..., Any],
    translate: Callable[[Any], dict[str, Any]] | None = None,
    in_place: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    min_sm: int = 80,
) -> Callable[[Callable[..., None]], Op]:
    """Register a launch as the torch operator `name` ("tk_domain::f_out").

    The decorated function launches the kernel for CUDA tensors. Its arguments are a tensor, then tensors, lists of
    tensors and scalars. It writes into the arguments in `mutates` and returns nothing; its annotations give the schema.
    `reference` runs for CPU tensors, and for CUDA tensors under the reference backend. `min_sm` is the compute
    capability × 10 of the oldest GPU that the kernel runs on. Eager calls with plain tensors launch directly; calls
    under torch.compile, or with fake tensors, modes or tensor subclasses, go through torch's dispatcher.

    `reference` is a function, or a name below the package's `reference/`, imported at the first call: "f" in the module
    at the same path as the launch's, or a dotted name such as "lib.cast.cast". It gets the operator's arguments whose
    names are among its parameters. For parameters that differ, `translate` receives all arguments as attributes of one
    object and returns a dict. The reference returns tensors, None or tuples of these; each tensor is copied into the
    argument of `mutates` at its position. An argument that the reference wrote itself needs no result.

    When the operator runs, under torch.compile too, each argument in `mutates` must have memory of its own, or the call
    raises ValueError, naming it as the operator's parameter: so a parameter has the name of the public function's
    argument that may be passed for it. `in_place` allows exceptions: {"d": ("c",)} if d may be c itself, the same
    elements at the same address, though not just overlap it.
    """

    def decorate(launch: Callable[..., None]) -> Op:
        return Op(name, launch, mutates, in_place, _stand_in(launch, mutates, reference, translate), min_sm)

    return decorate
