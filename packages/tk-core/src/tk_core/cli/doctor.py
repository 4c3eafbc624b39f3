"""`tk doctor`: whether kernels can be compiled and run here; for each fault, the exact command that mends it."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tk_core import faults
from tk_core.cli.machine import MIN_CUDA, Machine, SkipError, parse, pip_install, release
from tk_core.faults import FaultError

MIN_PYTHON = (3, 11)
# The oldest driver branch that runs each CUDA with all its minor releases (CUDA toolkit release notes, table 2).
MIN_DRIVER = {13: 580}

# The check that compiler and headers are of one release is CCCL's, and only some of TileLang's headers get there.
_PROBE = """\
#include <cuda_runtime.h>
#include <cuda/std/cstdint>
#if __has_include(<tl_templates/cuda/common.h>)
#include <tl_templates/cuda/common.h>
#endif
extern "C" __global__ void probe(float* x) { x[threadIdx.x] = 1.0f; }
"""


class NoteError(Exception):
    """Something worth knowing that is no fault."""

    def __init__(self, found: str, fix: str | None = None) -> None:
        super().__init__(found)
        self.fix = fix


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: Literal["ok", "note", "fault", "skipped"]
    found: str
    fix: str | None = None


def _python(machine: Machine) -> str:
    found = ".".join(map(str, machine.python))
    if machine.python[:2] < MIN_PYTHON:
        raise FaultError(f"{found}, needs {release(MIN_PYTHON)} or newer", "uv venv --python 3.13")
    return found


def _torch(machine: Machine) -> str:
    torch = machine.torch
    if isinstance(torch, Exception):
        if (installed := machine.installed("torch")) is None:
            raise FaultError("not installed", pip_install("torch>=2.10"))
        raise FaultError(
            f"{installed} can't be imported: {_last_line(torch)}",
            pip_install(f"torch=={installed}", options="--force-reinstall "),
        )
    if parse(torch.__version__) < (2, 10):
        raise FaultError(f"{torch.__version__}, needs 2.10 or newer", pip_install("torch>=2.10", options="--upgrade "))
    if machine.torch_cuda is None:
        found = f"{torch.__version__} is built without CUDA: references and compiling ahead work, but no kernel can run"
        if machine.driver_cuda is None:
            raise NoteError(found)
        version = torch.__version__.partition("+")[0]
        raise FaultError(found, pip_install(f"torch=={version}", options="--force-reinstall "))
    return f"{torch.__version__} for CUDA {release(machine.torch_cuda)}"


def _cuda_runtime(machine: Machine) -> str:
    if machine.torch_cuda is None:
        raise SkipError("needs a CUDA build of torch")
    wanted, installed = release(machine.torch_cuda), machine.installed("nvidia-cuda-runtime")
    if machine.torch_cuda < MIN_CUDA:
        raise NoteError(f"torch's is {wanted}; kernels are compiled for {release(machine.wanted_cuda)}")
    if installed is None:
        return f"{wanted}, not from wheels"
    if parse(installed) != machine.torch_cuda:
        raise FaultError(f"{installed} beside torch's {wanted}", pip_install(f"nvidia-cuda-runtime=={wanted}.*"))
    return installed


def _tvm_ffi(machine: Machine) -> str:
    from packaging.requirements import Requirement

    if machine.installed("tilelang") is None:
        raise SkipError("needs TileLang")
    needed = [Requirement(line) for line in importlib.metadata.requires("tilelang") or []]
    requirement = next((r for r in needed if r.name == "apache-tvm-ffi"), Requirement("apache-tvm-ffi"))
    installed = machine.installed("apache-tvm-ffi")
    if installed is None or not requirement.specifier.contains(installed, prereleases=True):
        found = "not installed" if installed is None else installed
        raise FaultError(f"{found}, TileLang needs {requirement.specifier}", pip_install(str(requirement)))
    return installed


def _tilelang(machine: Machine) -> str:
    from packaging.specifiers import SpecifierSet

    supported, installed = machine.compat.SUPPORTED_TILELANG, machine.compat.tilelang_version()
    if installed is None:
        raise FaultError("not installed", pip_install(f"tilelang{supported}"))
    if not SpecifierSet(supported).contains(installed, prereleases=True):
        raise FaultError(f"{installed}, supported are {supported}", pip_install(f"tilelang{supported}"))
    # TileLang makes its cache folder when it is imported.
    if machine.cache_fault is not None:
        raise SkipError("needs the cache folder")
    if isinstance(machine.tilelang, Exception):
        raise FaultError(
            f"{installed} can't be imported: {_last_line(machine.tilelang)}",
            pip_install(f"tilelang=={installed}", options="--force-reinstall --no-deps "),
        )
    return installed


def _host_compiler(machine: Machine) -> str:
    compiler = machine.host_compiler
    path = shutil.which(compiler) if compiler else None
    if path is None:
        raise faults.no_host_compiler(compiler, machine.os_family)
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise FaultError(f"{path} does not run: {error}", "sudo apt-get install --yes --reinstall g++") from error
    return f"{printed.stdout.strip().splitlines()[0]}, {path}" if printed.stdout.strip() else path


def _nvcc(machine: Machine) -> str:
    path = machine.compat.nvcc_path()
    if path is None:
        where = f"no nvcc in {machine.cuda_home}" if machine.cuda_home else "no CUDA toolkit found"
        raise FaultError(where, machine.mend_toolkit())
    try:
        found = machine.nvcc
    except SkipError as error:
        raise FaultError(f"{path} does not run", machine.mend_toolkit()) from error
    if found < MIN_CUDA:
        raise FaultError(f"{release(found)} at {path}, needs {release(MIN_CUDA)} or newer", machine.mend_toolkit())
    return f"{release(found)}, {path}"


def _headers(machine: Machine) -> str:
    nvcc, headers = machine.nvcc, machine.headers
    if not shutil.which(machine.host_compiler or ""):
        raise SkipError("needs a host compiler")
    # An nvcc that is a script may find headers elsewhere, so their absence is no fault before the probe has failed.
    where = f"headers {release(headers)}" if headers else f"no cuda_runtime_api.h in {machine.cuda_home}"
    versions = f"{where}, nvcc {release(nvcc)}"
    with tempfile.TemporaryDirectory(prefix="tk-doctor-") as folder:
        source = Path(folder, "probe.cu")
        source.write_text(_PROBE)
        command = machine.probe_command(source, Path(folder, "probe.cubin"))
        try:
            probe = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            raise FaultError(f"{versions}: {error}", machine.mend_toolkit()) from error
    if probe.returncode:
        printed = f"{probe.stderr}\n{probe.stdout}"
        mismatch = ""
        if headers and nvcc != headers:
            mismatch = f"nvcc is {'newer' if nvcc > headers else 'older'} than the CUDA headers: "
        raise FaultError(f"{versions}: {mismatch}{faults.first_error(printed)}", _mend_headers(machine, printed))
    if headers and nvcc != headers:
        raise NoteError(f"{versions}: of two releases, though a probe compiles", machine.mend_toolkit())
    return f"{versions}, a probe compiles"


def _mend_headers(machine: Machine, printed: str) -> str:
    if machine.cuda_home != machine.compat.wheel_cuda_home():
        return machine.mend_toolkit()
    pin = f"=={release(machine.wanted_cuda)}.*"
    # pip takes a wheel that is installed for whole; where files are missing, only fresh ones can help.
    fresh = "--force-reinstall --no-deps "
    if machine.headers is None:
        return pip_install(f"nvidia-cuda-runtime{pin}", f"nvidia-cuda-cccl{pin}", options=fresh)
    if re.search(r"fatal error: (cuda/std|cub|thrust)\S*: No such file", printed):
        return pip_install(f"nvidia-cuda-cccl{pin}", options=fresh)
    if machine.nvcc == machine.headers:
        return pip_install(*machine.compiler_wheels(), options=fresh)
    return machine.mend_toolkit()


def _driver(machine: Machine) -> str:
    found, wanted = machine.driver_cuda, max(machine.torch_cuda or MIN_CUDA, MIN_CUDA)
    if found is None:
        raise NoteError("no NVIDIA driver here: kernels can be compiled ahead, CPU tensors take the references")
    if found[0] < wanted[0]:
        branch = MIN_DRIVER.get(wanted[0], max(MIN_DRIVER.values()))
        rpm = faults.uses_rpm(machine.os_family)
        fix = "sudo dnf module install --assumeyes nvidia-driver:{}-open" if rpm else _APT_DRIVER
        raise FaultError(
            f"knows CUDA up to {release(found)}, kernels for CUDA {release(wanted)} need driver {branch} or newer",
            fix.format(branch),
        )
    return f"knows CUDA up to {release(found)}"


_APT_DRIVER = "sudo apt-get install --yes nvidia-driver-{}-server-open"


def _architecture(machine: Machine) -> str:
    if isinstance(machine.torch, Exception):
        raise SkipError("needs torch")
    from tk_core import env
    from tk_core.arch import ARCHS, arch_from_name

    served = {arch.sm: name for name, arch in ARCHS.items()}
    named = env.get("TK_ARCH")
    if named:
        try:
            arch_from_name(named)
        except ValueError as error:
            raise FaultError(f"TK_ARCH={named}: {error}", "unset TK_ARCH") from error
    found = [(name, major * 10 + minor) for name, (major, minor) in machine.gpus]
    if not found:
        if named:
            return f"{named} (TK_ARCH), no GPU here"
        raise NoteError("no GPU here: name the architecture when compiling ahead, such as tk warmup --arch sm_90a")
    listed = ", ".join(f"{name} ({served.get(sm, f'sm_{sm}')})" for name, sm in found)
    good = [str(index) for index, (_, sm) in enumerate(found) if sm in served]
    if len(good) < len(found):
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(good)}" if good else "export TK_BACKEND=reference"
        raise FaultError(f"{listed}: no kernels for some of these, only for {', '.join(ARCHS)}", fix)
    if named:
        raise NoteError(f"{listed}, but TK_ARCH={named} compiles for that instead", "unset TK_ARCH")
    return listed


def _cache_folder(machine: Machine) -> str:
    if machine.cache_fault is not None:
        raise machine.cache_fault
    folder = machine.compat.cache_dir()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < 1 << 30:
        raise NoteError(f"{folder}: only {free >> 20} MiB free")
    return str(folder)


# Each check with the exit code that names it; numbers stay when checks are added.
CHECKS: tuple[tuple[str, int, Callable[[Machine], str]], ...] = (
    ("Python", 11, _python),
    ("torch", 12, _torch),
    ("CUDA runtime", 13, _cuda_runtime),
    ("cache folder", 14, _cache_folder),
    ("tvm-ffi", 15, _tvm_ffi),
    ("TileLang", 16, _tilelang),
    ("host compiler", 17, _host_compiler),
    ("nvcc", 18, _nvcc),
    ("CUDA headers", 19, _headers),
    ("driver", 20, _driver),
    ("architecture", 21, _architecture),
)


def examine(machine: Machine) -> list[Finding]:
    """Run every check."""
    findings = []
    for check, _, look in CHECKS:
        try:
            finding = Finding(check, "ok", look(machine))
        except FaultError as fault:
            finding = Finding(check, "fault", fault.found, fault.fix)
        except NoteError as note:
            finding = Finding(check, "note", str(note), note.fix)
        except SkipError as skip:
            finding = Finding(check, "skipped", str(skip))
        findings.append(finding)
    return findings


def exit_code(findings: list[Finding]) -> int:
    """0 if nothing is at fault, else the number of the first check that is."""
    codes = {check: code for check, code, _ in CHECKS}
    return next((codes[finding.check] for finding in findings if finding.state == "fault"), 0)


def _last_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Check that kernels can be compiled and run here.

    Each check is ok, or comes with the command that mends it. Exit code 0 if there is no fault (a missing GPU is none:
    compiling works without one), else the number of the first check at fault: 11 Python, 12 torch, 13 CUDA runtime,
    14 cache folder, 15 tvm-ffi, 16 TileLang, 17 host compiler, 18 nvcc, 19 CUDA headers, 20 driver, 21 architecture.
    """
    findings = examine(Machine())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        raise typer.Exit(exit_code(findings))

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    colors = {"ok": "green", "note": "yellow", "fault": "bold red", "skipped": "dim"}
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:<8}", colors[finding.state]), f"{finding.check:<14} ", Text(finding.found)
        )
        # Commands must survive copying, so nothing is wrapped.
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"        {finding.fix}", "bold"), soft_wrap=True)
    faults = sum(finding.state == "fault" for finding in findings)
    verdict = "no faults" if not faults else f"{faults} fault{'s' if faults > 1 else ''}; run the command under each"
    console.print(verdict, soft_wrap=True)
    raise typer.Exit(exit_code(findings))
