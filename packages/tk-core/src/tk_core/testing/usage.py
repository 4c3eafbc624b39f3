"""Resources of an SM that a kernel uses (registers, local and shared memory), and its machine code.

Only tests use it. Like `tk_core.compat`, it has to know TileLang's internals.
"""

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from tk_core.arch import Arch
from tk_core.compat import CompiledKernel, cuda_home, load_tilelang
from tk_core.kernel import Kernel, KernelRequest


@dataclass(frozen=True)
class ResourceUsage:
    """The resources that ptxas assigned to one kernel function."""

    registers: int
    stack_bytes: int
    """Local memory per thread: spilled registers, and arrays that did not fit into registers."""
    shared_bytes: int
    """Shared memory per thread block: declared in the function, plus what the launch asks for."""


_RESERVED = 1024
"""Shared memory that the system takes per thread block: cuobjdump counts it, the limit of a thread block does not."""


def cubins(library: Path) -> list[bytes]:
    """The device binaries (ELF) inside a compiled kernel's host library."""
    data = library.read_bytes()
    found = []
    elf_machine_cuda = 190
    start = data.find(b"\x7fELF", 1)
    while start >= 0:
        header = data[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == elf_machine_cuda:
            program_table, section_table = struct.unpack_from("<QQ", header, 32)
            program_size, programs, section_size, sections = struct.unpack_from("<HHHH", header, 54)
            end = max(section_table + section_size * sections, program_table + program_size * programs)
            found.append(data[start : start + end])
        start = data.find(b"\x7fELF", start + 4)
    return found


def cuobjdump_path() -> Path | None:
    """NVIDIA's tool to look into device binaries: beside the compiler, or on PATH."""
    home = cuda_home()
    candidates = [home / "bin" / "cuobjdump"] if home else []
    if on_path := shutil.which("cuobjdump"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/cuobjdump"))
    return next((path for path in candidates if path.exists()), None)


def cuobjdump(compiled: CompiledKernel, *options: str) -> str:
    """What cuobjdump prints about a compiled kernel, such as with --dump-sass."""
    if compiled.library is None:
        raise ValueError("compiled: expected a kernel from the disk cache, which is switched off or took no file")
    return "\n".join(_cuobjdump(cubin, options) for cubin in cubins(compiled.library))


def _cuobjdump(cubin: bytes, options: Iterable[str]) -> str:
    tool = cuobjdump_path()
    if tool is None:
        raise FileNotFoundError("cuobjdump: not found beside nvcc or on PATH; install nvidia-cuda-cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


_parsed: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}
"""What TileLang made of a function's source, with the function, which keeps the ids in the key from being reused."""


def build(kernel: Kernel, *args: Any) -> Any:
    """`kernel.build`, in a third of the time after the first: it parses no function's source twice.

    Not for kernels in which TileLang would read another syntax for other arguments, such as a launch in a variable.
    """
    with _parsing_once():
        return kernel.build(*args)


@contextmanager
def _parsing_once() -> Iterator[None]:
    load_tilelang()
    from tilelang.language.eager import builder, utils

    parse = builder.mutate

    def parse_once(function: Callable[..., Any]) -> Any:
        captured = utils.get_func_nonlocals(function)
        key = id(function.__code__), id(function.__globals__), *captured
        _, generator = _parsed.get(key) or _parsed.setdefault(key, (function, parse(function)))
        made = generator.gen
        cells = tuple(CellType(captured[name]) for name in made.__code__.co_freevars)
        return replace(generator, gen=FunctionType(made.__code__, made.__globals__, made.__name__, None, cells))

    builder.mutate = parse_once
    try:
        yield
    finally:
        builder.mutate = parse


def lower(kernel: Kernel, *args: Any, simplified: bool = True) -> Any:
    """Generate a kernel's code for these arguments; `kernel_source` of the result is its CUDA, not yet compiled.

    Not `simplified`, it lacks TileLang's last pass over expressions, a sixth of the time, whose foldings are nvcc's
    too: resources of 33 kernels were equal, although the sources of 6 were not.

    Raises ValueError for a kernel without a tensor, and for one with an access that loses its guard.
    """
    lower_prim_func = load_tilelang().lower
    from tilelang import tvm

    target, configs, prim_func = tvm.target.Target(args[-1].target), _configs(kernel), build(kernel, *args)
    if not len(prim_func.buffer_map):
        # Host code learns device and stream from a tensor; with numbers alone a launch is on the default stream.
        raise ValueError(f"{kernel.name}: expected a tensor among the kernel's arguments, got none")
    guards = _lost_guards_raise(kernel) if configs.get("tl.disable_safe_memory_legalize") else nullcontext()
    passes = nullcontext() if simplified else _without_last_simplification()
    with tvm.transform.PassContext(opt_level=3, config=configs), target, guards, passes:
        return lower_prim_func(prim_func, target=target, enable_host_codegen=True)


@contextmanager
def _without_last_simplification() -> Iterator[None]:
    # By name: the package has a function `lower`, too.
    engine = import_module("tilelang.engine.lower")
    from tilelang import transform

    prepare = engine._prepare_device_codegen_mod
    engine._prepare_device_codegen_mod = lambda module: transform.HoistBroadcastValues()(
        transform.LowerIntrin()(module)
    )
    try:
        yield
    finally:
        engine._prepare_device_codegen_mod = prepare


@contextmanager
def _lost_guards_raise(kernel: Kernel) -> Iterator[None]:
    """Raise ValueError for a vectorized access with two conditions, one with a cast in it.

    TileLang 0.1.15 takes a cast for mixed precision, and moves such an access out of all conditions but the first. It
    adds the others again where its own bounds checks are not disabled.
    """
    from tilelang.transform import decouple_type_cast
    from tvm.tirx import IfThenElse

    extract, last = decouple_type_cast.extract_if_condition, None

    def extract_if_condition(stmt: Any) -> tuple[Any, Any]:
        nonlocal last
        condition, body = extract(stmt)
        # It asks a second time where it is about to move accesses.
        if isinstance(body, IfThenElse) and last is not None and last.same_as(stmt):
            raise ValueError(f"{kernel.name}: expected one condition, or none with a cast, around\n{body}")
        last = stmt
        return condition, body

    decouple_type_cast.extract_if_condition = extract_if_condition
    try:
        yield
    finally:
        decouple_type_cast.extract_if_condition = extract


def resource_usage(kernel: Kernel, *args: Any) -> dict[str, ResourceUsage]:
    """Registers, local and shared memory of each function of a kernel compiled for these arguments, by name.

    It is compiled as by `Kernel.compile`, but without the cache, and without the host library, a third of the time.
    """
    (usage,) = resource_usages([KernelRequest(kernel, args)], [lower(kernel, *args)])
    return usage


def machine_code(kernel: Kernel, *args: Any) -> tuple[str, dict[str, ResourceUsage]]:
    """What cuobjdump prints with --dump-sass, and what `resource_usage` returns, of one run of nvcc."""
    lowered = lower(kernel, *args)
    cubin = _cubin(_joined([lowered.kernel_source]), args[-1], _configs(kernel))
    return _cuobjdump(cubin, ["--dump-sass"]), _usage_in(_cuobjdump(cubin, ["--dump-resource-usage"]), 0, lowered)


def resource_usages(requests: Sequence[KernelRequest], lowered: Sequence[Any]) -> list[dict[str, ResourceUsage]]:
    """`resource_usage` of several kernels for one architecture; `lowered` is what `lower` returned for each.

    One run of nvcc compiles all kernels with the same options, as TileLang's headers take 2 s and a kernel 0.1 s.
    """
    options = [_configs(request.kernel) for request in requests]
    found: list[dict[str, ResourceUsage]] = [{} for _ in requests]
    for chosen in {repr(each): each for each in options}.values():
        indices = [index for index, each in enumerate(options) if each == chosen]
        sources = list(dict.fromkeys(lowered[index].kernel_source for index in indices))
        cubin = _cubin(_joined(sources), requests[indices[0]].arch, chosen)
        printed = _cuobjdump(cubin, ["--dump-resource-usage"])
        for index in indices:
            found[index] = _usage_in(printed, sources.index(lowered[index].kernel_source), lowered[index])
            if not found[index]:
                raise ValueError(f"{requests[index]}: found no kernel function in what it compiles to")
    return found


# An #include, with the #ifdef around it where there is one.
_INCLUDE = re.compile(r"^(?:#ifdef \w+\n#include <\S+>\n#endif|#include <\S+>)\n", re.MULTILINE)


def _joined(sources: Sequence[str]) -> str:
    """Join CUDA sources: all includes, then each source in its own namespace, with names of C that end in its index."""
    includes = dict.fromkeys(include for source in sources for include in _INCLUDE.findall(source))
    bodies = (
        f"namespace source_{index} {{\n{_with_index(_INCLUDE.sub('', source), index)}}}\n"
        for index, source in enumerate(sources)
    )
    return "".join((*includes, *bodies))


def _with_index(source: str, index: int) -> str:
    # Functions of the same name that are extern "C" are one, even in different namespaces; so is their shared memory.
    names = re.findall(r"^ +extern __shared__ [^;]*?(\w+)\[\];", source, re.MULTILINE)
    names += re.findall(r'^extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(', source, re.MULTILINE)
    return re.sub(rf"(?<![\w.])({'|'.join(dict.fromkeys(names))})\b", rf"\1_{index}", source)


def _cubin(source: str, arch: Arch, configs: dict[str, Any]) -> bytes:
    """Compile CUDA source."""
    load_tilelang()
    from tilelang import tvm
    from tilelang.cuda.backend import tilelang_callback_cuda_compile

    return bytes(tilelang_callback_cuda_compile(source, tvm.target.Target(arch.target), configs))


def _usage_in(printed: str, index: int, lowered: Any) -> dict[str, ResourceUsage]:
    """Usage of the functions of source number `index`, by the names that they have in that source."""
    launched = _dynamic_shared_bytes(lowered.rt_mod.inspect_source(), lowered.kernel_source)
    pattern = rf"Function (\S+)_{index}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {
        name: ResourceUsage(
            int(registers), int(stack) + int(local), max(0, int(shared) - _RESERVED) + launched.get(name, 0)
        )
        for name, registers, stack, shared, local in re.findall(pattern, printed)
    }


def _configs(kernel: Kernel) -> dict[str, Any]:
    return {**kernel._pass_configs, "tl.device_compile_flags": list(kernel._compile_flags)}


def _dynamic_shared_bytes(host: str, device: str) -> dict[str, int]:
    """Bytes of dynamic shared memory that host code asks for at launch, for each device function that uses any."""
    functions = re.split(r'(?=extern "C" __global__)', device)
    found = {}
    for launch in re.finditer(r"TVMFFIFunctionCall\((\w+)_packed, \(TVMFFIAny\*\) stack_ffi_any, (\d+),", host):
        name, count = launch[1], int(launch[2])
        body = next((each for each in functions if re.search(rf"\b{name}\([^;{{]*\)\s*{{", each)), "")
        if "extern __shared__" in body:
            # Arguments are stored one by one before the call; the last is the size.
            last = rf"stack_ffi_any\)\[{count - 1}\]\.v_int64\) = \(\(int64_t\)(\d+)\)"
            found[name] = int(re.findall(last, host[: launch.start()])[-1])
    return found
