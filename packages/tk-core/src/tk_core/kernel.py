"""@kernel: turns a builder of TileLang prim_funcs into a kernel, compiled once for each set of builder arguments."""

import linecache
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tk_core import compat, env, headers, stored
from tk_core.arch import Arch, compiling_for

_logger = logging.getLogger("tk_core")
_compile_lock = threading.RLock()

# Exact ops define each rounding, so nvcc must not contract a·b + c; kernels call fma explicitly where they want one.
_COMPILE_FLAGS = ("-fmad=false",)

_captured: list["KernelRequest"] | None = None
_recording: "Recording | None" = None


@dataclass(frozen=True)
class KernelRequest:
    """A kernel and the compile-time arguments that an op wants it compiled for; the last one is the architecture."""

    kernel: "Kernel"
    args: tuple[Any, ...]

    @property
    def arch(self) -> Arch:
        """Architecture that the kernel is for."""
        return self.args[-1]

    def compile(self) -> compat.CompiledKernel:
        """Compile it, or find it in the disk cache."""
        return self.kernel.compile(*self.args)

    def __call__(self, *_: Any) -> None:
        """Launch nothing: within `capture` a request stands for its compiled kernel."""


@dataclass(frozen=True)
class Recording:
    """The launches that one thread makes within `recorded_launches`, and what its ops write."""

    launches: list[tuple[Callable[..., None], tuple[Any, ...]]]
    """Each compiled kernel that was launched, with its arguments; within `capture` its request."""
    written: list[Tensor]
    """What its ops write."""
    thread: int


def recording() -> Recording | None:
    """The recording of this thread, if it is within `recorded_launches`."""
    return _recording if _recording is not None and _recording.thread == threading.get_ident() else None


def _recorded(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a compiled kernel so that a launch by the recording thread is added to its recording."""

    def launch(*args: Any) -> None:
        function(*args)
        if (recorded := recording()) is not None:
            recorded.launches.append((function, args))

    return launch


class Kernel:
    """A kernel builder with its table of compiled kernels. Made by `@kernel`."""

    def __init__(
        self, build: Callable[..., Any], pass_configs: Mapping[str, Any], compile_flags: tuple[str, ...]
    ) -> None:
        self._build = build
        self.name = f"{build.__module__}.{build.__name__}"
        self._pass_configs = pass_configs
        self._compile_flags = compile_flags
        self._functions: dict[tuple[Any, ...], Callable[..., None]] = {}
        self.__doc__ = build.__doc__

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def build(self, *args: Any) -> Any:
        """The TileLang prim_func for these arguments, preceded by the CUDA headers whose functions it calls."""
        with headers.collected() as called:
            try:
                prim_func = self._build(*args)
            except OSError as error:
                if linecache.getlines(file := self._build.__code__.co_filename):
                    raise
                source = "the builder's source text, which Python has for a file or a notebook cell"
                raise RuntimeError(f"{self.name}: TileLang needs {source}, but not for {file}") from error
        return compat.with_prelude(prim_func, headers.prelude(called)) if called else prim_func

    def __call__(self, *args: Any) -> Callable[..., None]:
        """Return the kernel compiled for these arguments, the `Arch` last. Call the result with tensors and scalars."""
        if _captured is not None:
            function = KernelRequest(self, args)
            _captured.append(function)
        elif (function := self._functions.get(args)) is None:
            function = self._load(args)
        return function if _recording is None else _recorded(function)

    def _load(self, args: tuple[Any, ...]) -> Callable[..., None]:
        with _compile_lock:
            if args not in self._functions:
                self._functions[args] = self.compile(*args).function
            return self._functions[args]

    def compile(self, *args: Any) -> compat.CompiledKernel:
        """Compile for these arguments, or load from the disk cache, without adding the result to the table."""
        arch = args[-1]
        if not isinstance(arch, Arch):
            raise TypeError(f"{self.name}: expected an Arch as the last argument, got {arch!r}")
        name = f"{self.name}{args!r}"
        _logger.debug("loading %s", name)
        note = stored.note_path(self._build, args, self._pass_configs, self._compile_flags)
        compiled = stored.load(note) if note else None
        if compiled is None:
            compat.require_compiling(name)
            compat.load_tilelang()
            compiled = compat.compile_prim_func(name, self.build(*args), arch, self._pass_configs, self._compile_flags)
            if note:
                stored.write_note(note, compiled)
        if env.flag("TK_PRINT_KERNEL_SOURCE"):
            print(f"// {name}\n{compiled.source()}", flush=True)
        return compiled


def kernel(
    build: Callable[..., Any] | None = None,
    *,
    pass_configs: Mapping[str, Any] | None = None,
    compile_flags: tuple[str, ...] = (),
) -> Any:
    """Turn a function that returns a TileLang prim_func into a `Kernel`.

    The function's arguments are the compile key: all hashable, the `Arch` last, and never a token count. The prim_func
    must depend on nothing else. The function may be in a package, a script or a notebook. `pass_configs` go to TileLang
    and `compile_flags` to nvcc, in addition to the defaults.
    """
    configs, flags = dict(pass_configs or {}), (*_COMPILE_FLAGS, *compile_flags)
    if build is None:
        return lambda function: Kernel(function, configs, flags)
    return Kernel(build, configs, flags)


@contextmanager
def capture(arch: Arch) -> Iterator[list[KernelRequest]]:
    """Collect the kernels that ops would launch on `arch`, compiling and launching none.

    Within it, call ops on tensors of the meta device: they take their kernel path, and each kernel that they ask for is
    appended to the list. `recorded_launches` beside it records what they would launch the kernels with.
    """
    global _captured
    before, _captured = _captured, []
    try:
        with compiling_for(arch):
            yield _captured
    finally:
        _captured = before


@contextmanager
def recorded_launches() -> Iterator[Recording]:
    """Record the launches that this thread makes."""
    global _recording
    with _compile_lock:
        before, _recording = _recording, Recording([], [], threading.get_ident())
        try:
            yield _recording
        finally:
            _recording = before


def capturing() -> bool:
    """Whether kernels are being collected by `capture`."""
    return _captured is not None
