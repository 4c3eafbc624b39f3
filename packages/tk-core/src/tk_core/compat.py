"""The only file that touches TileLang's internals and its choice of CUDA toolkit at run time.

Kernels use tilelang.language; everything else goes through this file, so that a new TileLang changes this file only.
The one other file that knows TileLang's internals is `tk_core.testing.usage`, which tests use.
"""

import ctypes
import importlib.metadata
import importlib.util
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tk_core import env, faults
from tk_core.faults import FaultError

if TYPE_CHECKING:
    from tk_core.arch import Arch

_logger = logging.getLogger("tk_core")

SUPPORTED_TILELANG = ">=0.1.15,<0.1.16"
"""The versions that compile our kernels: TileLang renames things between patch releases."""

LOADING_TILELANG = ">=0.1.12,<0.1.16"
"""The versions that load what COMPILED_BY has compiled, and the packages' bounds: vLLM and SGLang pin 0.1.12."""

COMPILED_BY = "0.1.15"
"""The version whose kernels are loaded where the installed one compiles none."""

num_compilations = 0
"""Kernels that this process compiled itself, rather than finding them in the disk cache."""

_forbidden_kernel: ContextVar[str | None] = ContextVar("_forbidden_kernel", default=None)
"""Our kernel that is being loaded under TK_COMPILE=forbid. None otherwise, and for kernels that are not ours."""


class CompilationForbiddenError(RuntimeError):
    """TK_COMPILE=forbid, and a kernel is not in the disk cache."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel, loaded and ready to launch."""

    name: str
    """Name of the kernel's function in `library`."""
    function: Callable[..., None]
    """Takes the prim_func's tensors and scalars in order; launches on the current stream of the tensors' device."""
    library: Path | None
    """The host library with the cubin inside; None if TileLang's disk cache is off or could not be written."""
    source: Callable[[], str]
    """Generated CUDA source."""


def tilelang_version() -> str | None:
    """Installed version of TileLang, or None."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None


def only_loads() -> bool:
    """Whether the installed TileLang loads compiled kernels but compiles none of ours."""
    from packaging.specifiers import SpecifierSet

    version = tilelang_version()
    loads, compiles = (
        version is not None and SpecifierSet(bounds).contains(version, prereleases=True)
        for bounds in (LOADING_TILELANG, SUPPORTED_TILELANG)
    )
    return loads and not compiles


def compiler_version() -> str | None:
    """Version of the TileLang that compiles the kernels that are loaded here; None if none is installed."""
    return COMPILED_BY if only_loads() else tilelang_version()


@cache
def wheel_cuda_home() -> Path | None:
    """The CUDA toolkit installed from wheels, if it includes nvcc."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc")):
            return nvcc.parent.parent
    return None


def cuda_home() -> Path | None:
    """The CUDA toolkit that kernels are compiled with.

    CUDA_HOME or CUDA_PATH if set, else the toolkit from wheels (it matches torch's CUDA), else the one whose nvcc is on
    PATH, else /usr/local/cuda.
    """
    if named := env.get("CUDA_HOME") or env.get("CUDA_PATH"):
        return Path(named)
    if (wheels := wheel_cuda_home()) is not None:
        return wheels
    if found := shutil.which("nvcc"):
        visible = Path(found).parent.parent
        return visible if (visible / "include" / "cuda_runtime.h").exists() else Path(found).resolve().parent.parent
    default = Path("/usr/local/cuda")
    return default if default.exists() else None


def nvcc_path() -> Path | None:
    """The CUDA compiler that TileLang will call, if it is there."""
    home = cuda_home()
    nvcc = home / "bin" / "nvcc" if home else None
    return nvcc if nvcc and nvcc.exists() else None


def host_compiler() -> str | None:
    """The C++ compiler that TileLang hands to nvcc and links host code with, if it is there."""
    tilelang = load_tilelang()
    from tilelang.contrib import cc

    assert tilelang is not None
    return cc.get_cplus_compiler()


def cache_dir() -> Path:
    """Folder of the compiled kernels."""
    return Path(env.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


def require_compiling(kernel: str) -> None:
    """Check that the installed TileLang compiles `kernel`, which is not in the cache.

    Raises FaultError if it only loads kernels, or CompilationForbiddenError if TK_COMPILE=forbid too.
    """
    if not only_loads():
        return
    if env.compiling_is_forbidden():
        raise _forbidden(kernel)
    raise FaultError(
        f"{kernel} is not in the cache, {cache_dir()}, and TileLang {tilelang_version()} only loads kernels",
        f"tk cache import FILE, which tk warmup and tk cache export wrote where TileLang {COMPILED_BY} is installed",
    )


def _forbidden(kernel: str) -> CompilationForbiddenError:
    return CompilationForbiddenError(f"{kernel}: TK_COMPILE=forbid, and it is not in the cache, {cache_dir()}")


@cache
def load_tilelang() -> Any:
    """Import TileLang with our defaults: the toolkit from wheels before one on PATH, and no line per compilation.

    Raises FaultError if its cache folder can't be made.
    """
    home = wheel_cuda_home()
    if home is not None and env.get("CUDA_PATH") is None:
        env.set_default("CUDA_HOME", str(home))
    env.set_default("TILELANG_PRINT_ON_COMPILATION", "0")
    try:
        import tilelang
    except OSError:
        # TileLang makes its cache folder when it is imported.
        if fault := faults.cache_fault(cache_dir()):
            raise fault from None
        raise
    # `compile_prim_func` logs a kernel that could not be stored, in one line.
    logging.getLogger("tilelang.cache.kernel_cache").addFilter(lambda line: line.funcName != "_save_kernel_to_disk")
    from tilelang.jit import JITKernel

    compile_kernel = JITKernel._compile_and_create_adapter

    def compile_unless_forbidden(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (kernel := _forbidden_kernel.get()) is not None:
            raise _forbidden(kernel)
        return compile_kernel(self, *args, **kwargs)

    # TileLang calls this method only for a kernel that it has not found in its cache.
    JITKernel._compile_and_create_adapter = compile_unless_forbidden
    return tilelang


@cache
def _load_runtime() -> None:
    """Load TileLang's shared libraries, as importing it does, without importing its Python."""
    spec = importlib.util.find_spec("tilelang")
    assert spec is not None
    assert spec.submodule_search_locations
    for name in ("libtvm_runtime.so", "libtvm_compiler.so", "libtilelang.so"):
        ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", name)), ctypes.RTLD_GLOBAL)


def load_function(library: Path, name: str) -> Callable[..., None]:
    """Load the function of a compiled kernel from its library, without importing TileLang."""
    import tvm_ffi

    _load_runtime()
    return tvm_ffi.load_module(str(library))[name]


def with_prelude(prim_func: Any, cuda: str) -> Any:
    """A prim_func with CUDA source before its kernel, and before what T.import_source added."""
    from tilelang import tvm

    def add(block: Any) -> Any:
        if block.name_hint != "tilelang_root":
            return None
        annotations = dict(block.annotations)
        annotations["pragma_import_c"] = cuda + str(annotations.get("pragma_import_c", ""))
        parts = (block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init)
        return tvm.tirx.SBlock(*parts, block.alloc_buffers, block.match_buffers, annotations)

    return prim_func.with_body(tvm.tirx.stmt_functor.ir_transform(prim_func.body, None, add, ["tirx.SBlock"]))


def with_stride_types(prim_func: Any) -> Any:
    """A prim_func with an attribute that lists its run-time strides which are not int32, if there are any.

    TileLang's cache goes by a prim_func's text, which has these strides' names alone: with another type of theirs, a
    kernel from before would be loaded.
    """
    strides = (stride for buffer in prim_func.buffer_map.values() for stride in buffer.strides)
    wide = [f"{x.name}: {x.dtype}" for x in strides if hasattr(x, "name") and x.dtype != "int32"]
    return prim_func.with_attr("tk.stride_types", ", ".join(wide)) if wide else prim_func


def structural_hash(prim_func: Any) -> str:
    """Hash of a prim_func but for the names of its variables; the same in all processes with this TileLang."""
    from tilelang import tvm

    return f"{tvm.ir.structural_hash(prim_func, map_free_vars=True):x}"


def compile_prim_func(
    kernel: str, prim_func: Any, arch: "Arch", pass_configs: Mapping[str, Any], compile_flags: tuple[str, ...]
) -> CompiledKernel:
    """Compile a kernel for an architecture, or load it from TileLang's disk cache; `kernel` names it in errors.

    Raises FaultError, with the command that fixes it, if a compiler or the cache folder prevents the compilation, and
    CompilationForbiddenError if TK_COMPILE=forbid and the kernel is not in the cache.
    """
    global num_compilations
    tilelang = load_tilelang()
    name = str(prim_func.attrs["global_symbol"])
    before = _forbidden_kernel.set(kernel if env.compiling_is_forbidden() else None)
    try:
        jit_kernel = tilelang.compile(
            with_stride_types(prim_func),
            target=arch.target,
            execution_backend="tvm_ffi",
            pass_configs=dict(pass_configs),
            compile_flags=list(compile_flags),
        )
        executable = jit_kernel.adapter.get_exportable_executable()
        module = executable.jit() if hasattr(executable, "jit") else executable
    except CompilationForbiddenError:
        raise
    except (OSError, RuntimeError) as error:
        fault = _fault(str(error))
        if fault is None:
            raise
        # The error's message includes all of the CUDA source.
        shown = error if env.flag("TK_PRINT_KERNEL_SOURCE") else None
        raise FaultError(f"{name} for {arch.name} was not compiled: {fault.found}", fault.fix) from shown
    finally:
        _forbidden_kernel.reset(before)
    # A kernel from the cache has no artifact.
    num_compilations += jit_kernel.artifact is not None
    entry = getattr(jit_kernel, "_tilelang_cache_path", None)
    library = Path(entry) / "executable.so" if entry else None
    if library and not library.exists():
        library = None
        fault = faults.cache_fault(cache_dir()) or faults.unwritable_cache(cache_dir(), "a kernel was not kept")
        _logger.warning("%s for %s was compiled for this process only: %s", name, arch.name, fault)
    return CompiledKernel(
        name=name,
        function=module[name],
        library=library,
        source=lambda: jit_kernel.adapter.get_kernel_source(kernel_only=True),
    )


def _fault(printed: str) -> FaultError | None:
    """What is wrong with this machine, given TileLang's error message `printed`; None if that is not known."""
    compiler = host_compiler()
    if compiler is None or shutil.which(compiler) is None:
        return faults.no_host_compiler(compiler, faults.os_family())
    if nvcc_path() is None:
        return FaultError(f"there is no CUDA compiler in {cuda_home()}", "tk doctor")
    folder = cache_dir()
    if refused := re.search(rf"\[Errno \d+\] ([^:\n]+): '{re.escape(str(folder))}", printed):
        return faults.unwritable_cache(folder, refused[1])
    if fault := faults.cache_fault(folder):
        return fault
    _, failed, message = printed.rpartition("Compilation error:")
    return FaultError(f"the compiler said: {faults.first_error(message)}", "tk doctor") if failed else None
