"""`tk doctor`: whether kernels can be compiled and run here; for each fault, the command that mends it."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from tk_core import env, faults
from tk_core.cli.machine import MIN_CUDA, Machine, pip_install
from tk_core.faults import FaultError

# CCCL's headers refuse an nvcc of another release, and only some of TileLang's headers include those.
_PROBE = "#include <cuda/std/cstdint>\n#include <tl_templates/cuda/common.h>\n"
# What a check found, if that is well; else its state and what it found. A fault is raised.
Found = str | tuple[Literal["note", "skipped"], str]


class Finding(NamedTuple):
    """What one check found, and for a fault the command that mends it."""

    check: str
    state: Literal["ok", "note", "fault", "skipped"]
    found: str
    fix: str | None = None


def _python(machine: Machine) -> Found:
    found = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        raise FaultError(f"{found}, needs 3.11 or newer", "uv venv --python 3.13")
    return found


def _require(wanted: str, installed: str | None) -> str:
    from packaging.requirements import Requirement

    if installed is None or not Requirement(wanted).specifier.contains(installed, prereleases=True):
        raise FaultError(f"{installed or 'not installed'}, needs {wanted}", pip_install(wanted))
    return installed


def _torch(machine: Machine) -> Found:
    version = _require("torch>=2.10", getattr(machine.torch, "__version__", machine.installed("torch")))
    reinstall = pip_install(f"torch=={version.partition('+')[0]}", options="--force-reinstall")
    if isinstance(machine.torch, Exception):
        raise FaultError(f"{version} can't be imported: {machine.torch!r}", reinstall)
    if machine.torch_cuda:
        return f"{version} for CUDA {_text(machine.torch_cuda)}"
    found = f"{version} is built without CUDA: references and compiling ahead work, but no kernel can run"
    if machine.driver_cuda:
        raise FaultError(found, reinstall)
    return "note", found


def _cuda_runtime(machine: Machine) -> Found:
    if machine.torch_cuda is None:
        return "skipped", "needs a CUDA build of torch"
    wanted, installed = _text(machine.torch_cuda), machine.installed("nvidia-cuda-runtime")
    if machine.torch_cuda < MIN_CUDA:
        return "note", f"torch's is {wanted}; kernels are compiled for {_text(machine.nvcc or MIN_CUDA)}"
    return _require(f"nvidia-cuda-runtime=={wanted}.*", installed) if installed else f"{wanted}, not from wheels"


def _cache_folder(machine: Machine) -> Found:
    folder = machine.compat.cache_dir()
    if (fault := faults.cache_fault(folder)) is None:
        return str(folder)
    kernels = sum(os.access(file, os.R_OK) for file in folder.glob("*/*/kernels/*/executable.so"))
    if kernels and not os.access(folder, os.W_OK):
        return "note", f"{folder} is read-only: its {kernels} kernels can be loaded, but no others can be compiled"
    raise fault


def _tvm_ffi(machine: Machine) -> Found:
    if machine.installed("tilelang") is None:
        return "skipped", "needs TileLang"
    wanted = next(line for line in importlib.metadata.requires("tilelang") if line.startswith("apache-tvm-ffi"))
    return _require(wanted, machine.installed("apache-tvm-ffi"))


def _tilelang(machine: Machine) -> Found:
    installed = _require(f"tilelang{machine.compat.SUPPORTED_TILELANG}", machine.compat.tilelang_version())
    if isinstance(machine.tilelang, FaultError):
        raise machine.tilelang
    if machine.tilelang:
        fix = pip_install(f"tilelang=={installed}", options="--force-reinstall --no-deps")
        raise FaultError(f"{installed} can't be imported: {machine.tilelang!r}", fix)
    return installed


def _host_compiler(machine: Machine) -> Found:
    if (path := shutil.which(machine.host_compiler or "")) is None:
        raise faults.no_host_compiler(machine.host_compiler, machine.os_family)
    return path


def _nvcc(machine: Machine) -> Found:
    path, nvcc = machine.compat.nvcc_path(), machine.nvcc
    if path is None:
        raise FaultError(f"no nvcc in {machine.compat.cuda_home() or 'any CUDA toolkit'}", machine.mend_toolkit())
    if nvcc is None or nvcc < MIN_CUDA:
        found = f"{_text(nvcc)} at {path}, needs {_text(MIN_CUDA)} or newer" if nvcc else f"{path} does not run"
        raise FaultError(found, machine.mend_toolkit())
    return f"{_text(nvcc)}, {path}"


def _headers(machine: Machine) -> Found:
    nvcc, headers, compiler = machine.nvcc, machine.headers, shutil.which(machine.host_compiler or "")
    if nvcc is None or compiler is None or machine.tilelang:
        return "skipped", "needs nvcc, a host compiler and TileLang"
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    with tempfile.TemporaryDirectory(prefix="tk-doctor-") as folder:
        Path(folder, "probe.cu").write_text(_PROBE)
        command = [str(machine.compat.nvcc_path()), f"-ccbin={compiler}", "--cubin", "-arch=sm_90a", "-std=c++20"]
        command += [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR) if path]
        probe = subprocess.run([*command, "probe.cu"], cwd=folder, capture_output=True, text=True)
    found = f"nvcc {_text(nvcc)}, " + (f"headers {_text(headers)}" if headers else "no cuda_runtime_api.h beside it")
    differ = headers not in (None, nvcc)
    if differ:
        found += f": nvcc is {'newer' if nvcc > headers else 'older'} than the CUDA headers"
    if probe.returncode:
        raise FaultError(f"{found}: {faults.first_error(probe.stderr + probe.stdout)}", machine.mend_toolkit())
    return ("note", f"{found}, though a probe compiles") if differ else found


def _driver(machine: Machine) -> Found:
    if machine.driver_cuda is None:
        return "note", "no NVIDIA driver here: kernels can be compiled ahead, CPU tensors take the references"
    found = f"knows CUDA up to {_text(machine.driver_cuda)}"
    if machine.driver_cuda < MIN_CUDA:
        fix = "sudo apt-get install --yes nvidia-driver-580-server-open"
        raise FaultError(f"{found}, kernels need {_text(MIN_CUDA)}: driver 580 or newer", fix)
    return found


def _architecture(machine: Machine) -> Found:
    from tk_core.arch import ARCHS, arch_from_name

    if named := env.get("TK_ARCH"):
        try:
            return f"{arch_from_name(named).name}, by TK_ARCH"
        except ValueError as error:
            raise FaultError(f"TK_ARCH={named}: {error}", "unset TK_ARCH") from error
    if not machine.gpus:
        return "note", "no GPU here: name the architecture when compiling ahead, such as tk warmup --arch sm_90a"
    listed = ", ".join(f"{name} (sm_{major}{minor})" for name, (major, minor) in machine.gpus)
    served = {divmod(arch.sm, 10) for arch in ARCHS.values()}
    good = [str(index) for index, (_, capability) in enumerate(machine.gpus) if capability in served]
    if len(good) < len(machine.gpus):
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(good)}" if good else "export TK_BACKEND=reference"
        raise FaultError(f"{listed}: no kernels for some of these, only for {', '.join(ARCHS)}", fix)
    return listed


# Each check with the exit code that names it; numbers stay when checks are added.
CHECKS: tuple[tuple[str, int, Callable[[Machine], Found]], ...] = (
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
    """Run every check; without torch, only the first two."""
    findings = []
    for check, code, look in CHECKS:
        try:
            found = ("skipped", "needs torch") if code > 12 and isinstance(machine.torch, Exception) else look(machine)
            findings.append(Finding(check, *(("ok", found) if isinstance(found, str) else found)))
        except FaultError as fault:
            findings.append(Finding(check, "fault", fault.found, fault.fix))
    return findings


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False) -> None:
    """Check that kernels can be compiled and run here.

    Each check is ok, or comes with the command that mends it. Exit code 0 if there is no fault (a missing GPU is none:
    compiling works without one), else the number of the first check at fault: 11 Python, 12 torch, 13 CUDA runtime,
    14 cache folder, 15 tvm-ffi, 16 TileLang, 17 host compiler, 18 nvcc, 19 CUDA headers, 20 driver, 21 architecture.
    """
    findings = examine(Machine())
    faulty = [code for finding, (_, code, _) in zip(findings, CHECKS) if finding.state == "fault"]
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        colors = {"ok": "green", "note": "yellow", "fault": "red", "skipped": None}
        for check, state, found, fix in findings:
            typer.echo(f"{typer.style(f'{state:<8}', colors[state])}{check:<14} {found}")
            if fix:
                typer.echo(f"        {fix}")
        typer.echo(f"{len(faulty)} at fault; run the command under each" if faulty else "no faults")
    raise typer.Exit(faulty[0] if faulty else 0)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
