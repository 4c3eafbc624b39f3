"""`tk doctor`: whether kernels can be compiled and run here; for each fault, the command that fixes it."""

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Annotated, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.version import Version

from tk_core import compat, env, faults
from tk_core.faults import FaultError

MIN_CUDA = Version("13.0")
# CCCL's headers refuse an nvcc of another release, and only some of TileLang's headers include those.
_PROBE = "#include <cuda/std/cstdint>\n#include <tl_templates/cuda/common.h>\n"
_COLORS = {"ok": "green", "note": "yellow", "fault": "red", "skipped": None}


class Finding(NamedTuple):
    """What a check found: its state, one of `_COLORS`, and for a fault the command that fixes it."""

    state: str
    found: str
    fix: str | None = None


_ONLY_LOADS = Finding("skipped", "kernels are loaded here, not compiled")


def installed(distribution: str) -> str | None:
    """Version of an installed distribution."""
    return next((found.version for found in importlib.metadata.distributions(name=distribution)), None)


def pip_install(*arguments: str) -> str:
    """The command that installs the given requirements, with the given options, into this Python's environment."""
    quoted = " ".join(each if each.startswith("--") else f'"{each}"' for each in arguments)
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {quoted}" if installed("pip") else f"uv pip install {quoted} --python {python}"


def torch_cuda() -> Version | None:
    """CUDA release that torch is built for."""
    import torch

    return Version(torch.version.cuda) if torch.version.cuda else None


def driver_cuda() -> Version | None:
    """Newest CUDA release that the driver supports."""
    number = ctypes.c_int()
    with suppress(OSError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return Version(f"{number.value // 1000}.{number.value % 1000 // 10}") if number.value else None


def nvcc_cuda() -> Version | None:
    """CUDA release of the compiler, if it runs."""
    printed = subprocess.getoutput(f"{shlex.quote(str(compat.nvcc_path()))} --version")
    return Version(found[1]) if (found := re.search(r"release (\d+\.\d+)", printed)) else None


def _mend_toolkit() -> str:
    """The command that gives us a CUDA toolkit whose parts match each other and torch."""
    if (env.get("CUDA_HOME") or env.get("CUDA_PATH")) and compat.cuda_home() != compat.wheel_cuda_home():
        return "unset CUDA_HOME CUDA_PATH"
    release = max(torch_cuda() or MIN_CUDA, MIN_CUDA)
    wheels = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
    # Reinstall, because pip assumes an installed wheel is complete, and some of its files may be missing.
    return pip_install(*(f"{wheel}=={release}.*" for wheel in wheels), "--force-reinstall", "--no-deps")


def _require(wanted: str, version: str | None, fix: str | None = None) -> str:
    """Return `version` if `wanted` allows it, else raise FaultError; by default `fix` is the command to install it."""
    if version is None or not Requirement(wanted).specifier.contains(version, prereleases=True):
        raise FaultError(f"{version or 'not installed'}, needs {wanted}", fix or pip_install(wanted))
    return version


def _python() -> Finding:
    return Finding("ok", _require("python>=3.11", platform.python_version(), "uv venv --python 3.13"))


def _torch() -> Finding:
    version = _require("torch>=2.10", installed("torch"))
    reinstall = pip_install(f"torch=={Version(version).public}", "--force-reinstall")
    try:
        cuda = torch_cuda()
    except Exception as error:
        raise FaultError(f"{version} can't be imported: {error!r}", reinstall) from error
    found = f"for CUDA {cuda}" if cuda else "without CUDA: references and compiling ahead work, but no kernel can run"
    if cuda is None and driver_cuda():
        raise FaultError(f"{version} {found}", reinstall)
    return Finding("ok" if cuda else "note", f"{version} {found}")


def _cuda_runtime() -> Finding:
    wanted, version = torch_cuda(), installed("nvidia-cuda-runtime")
    if wanted and wanted < MIN_CUDA:
        return Finding("note", f"torch's is {wanted}; kernels are compiled for {nvcc_cuda() or MIN_CUDA}")
    if wanted is None or version is None:
        return Finding("skipped", "torch is built without CUDA, or its CUDA is not from wheels")
    return Finding("ok", _require(f"nvidia-cuda-runtime=={wanted}.*", version))


def _cache_folder() -> Finding:
    folder = compat.cache_dir()
    if (fault := faults.cache_fault(folder)) is None:
        return Finding("ok", str(folder))
    kernels = sum(os.access(file, os.R_OK) for file in folder.glob("*/*/kernels/*/executable.so"))
    if kernels and not os.access(folder, os.W_OK):
        found = f"{folder} is read-only: its {kernels} kernels can be loaded, but no others can be compiled"
        return Finding("note", found)
    raise fault


def _tvm_ffi() -> Finding:
    if installed("tilelang") is None:
        return Finding("skipped", "needs TileLang")
    wanted = next(line for line in importlib.metadata.requires("tilelang") if line.startswith("apache-tvm-ffi"))
    return Finding("ok", _require(wanted, installed("apache-tvm-ffi")))


def _tilelang() -> Finding:
    version = _require(f"tilelang{compat.LOADING_TILELANG}", installed("tilelang"))
    if compat.only_loads():
        return Finding(
            "note", f"{version} compiles no kernels, but loads those of {compat.COMPILED_BY}: tk cache import"
        )
    try:
        compat.load_tilelang()
    except FaultError:
        raise
    except Exception as error:
        fix = pip_install(f"tilelang=={version}", "--force-reinstall", "--no-deps")
        raise FaultError(f"{version} can't be imported: {error!r}", fix) from error
    return Finding("ok", version)


def _host_compiler() -> Finding:
    if compat.only_loads():
        return _ONLY_LOADS
    compiler = compat.host_compiler()
    if (path := shutil.which(compiler or "")) is None:
        raise faults.no_host_compiler(compiler, faults.os_family())
    return Finding("ok", path)


def _nvcc() -> Finding:
    if compat.only_loads():
        return _ONLY_LOADS
    release, path = nvcc_cuda(), compat.nvcc_path()
    found = f"{release or 'does not run'} at {path}" if path else f"none in {compat.cuda_home() or 'any CUDA toolkit'}"
    if release is None or release < MIN_CUDA:
        raise FaultError(f"{found}, needs {MIN_CUDA} or newer", _mend_toolkit())
    return Finding("ok", found)


def _headers() -> Finding:
    folders = compat.load_tilelang().env
    command = [compat.nvcc_path(), f"-ccbin={compat.host_compiler()}", "--cubin", "-arch=sm_90a", "-std=c++20"]
    command += [f"-I{folders.TILELANG_TEMPLATE_PATH}", f"-I{folders.CUTLASS_INCLUDE_DIR}", "-x=cu", "-"]
    probe = subprocess.run([*command, f"-o={os.devnull}"], input=_PROBE, capture_output=True, text=True)
    header = compat.cuda_home() / "include" / "cuda_runtime_api.h"  # 13.2 is written 13020 there
    release = re.search(r"#define CUDART_VERSION\s+(\d+)0(\d)0", header.read_text() if header.exists() else "")
    nvcc, headers = nvcc_cuda(), release and Version(".".join(release.groups()))
    found = f"nvcc {nvcc}, " + (f"headers {headers}" if headers else "no cuda_runtime_api.h beside it")
    if differ := headers not in (None, nvcc):
        found += f": nvcc is {'newer' if nvcc > headers else 'older'} than the CUDA headers"
    if probe.returncode:
        raise FaultError(f"{found}: {faults.first_error(probe.stderr + probe.stdout)}", _mend_toolkit())
    return Finding("note", f"{found}, though a probe compiles") if differ else Finding("ok", found)


def _driver() -> Finding:
    if (release := driver_cuda()) is None:
        return Finding("note", "no NVIDIA driver here: kernels can be compiled ahead, CPU tensors take the references")
    if release < MIN_CUDA:
        fix = "sudo apt-get install --yes nvidia-driver-580-server-open"
        raise FaultError(f"knows CUDA up to {release}, kernels need {MIN_CUDA}: driver 580 or newer", fix)
    return Finding("ok", f"knows CUDA up to {release}")


def _architecture() -> Finding:
    import torch

    from tk_core.arch import ARCHS, arch_from_name

    if named := env.get("TK_ARCH"):
        with suppress(ValueError):
            return Finding("ok", f"{arch_from_name(named).name}, by TK_ARCH")
        raise FaultError(f"TK_ARCH={named}, needs one of {', '.join(ARCHS)}", "unset TK_ARCH")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not gpus:
        return Finding("note", "no GPU here: name the architecture to compile for, as in tk warmup --arch sm_90a")
    found = ", ".join(f"{gpu.name} (sm_{gpu.major}{gpu.minor})" for gpu in gpus)
    served = {divmod(arch.sm, 10) for arch in ARCHS.values()}
    good = [str(index) for index, gpu in enumerate(gpus) if (gpu.major, gpu.minor) in served]
    if len(good) < len(gpus):
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(good)}" if good else "export TK_BACKEND=reference"
        raise FaultError(f"{found}: no kernels for some of these, only for {', '.join(ARCHS)}", fix)
    return Finding("ok", found)


# Each check with its exit code and the checks that have to pass before it. Exit codes never change.
CHECKS = (
    ("Python", 11, _python, ()),
    ("torch", 12, _torch, ()),
    ("CUDA runtime", 13, _cuda_runtime, ("torch",)),
    ("cache folder", 14, _cache_folder, ()),
    ("tvm-ffi", 15, _tvm_ffi, ()),
    ("TileLang", 16, _tilelang, ("torch",)),
    ("host compiler", 17, _host_compiler, ("TileLang",)),
    ("nvcc", 18, _nvcc, ("torch",)),
    ("CUDA headers", 19, _headers, ("TileLang", "host compiler", "nvcc")),
    ("driver", 20, _driver, ()),
    ("architecture", 21, _architecture, ("torch",)),
)


def examine() -> dict[str, Finding]:
    """Run every check, except those that need a check that did not pass."""
    findings: dict[str, Finding] = {}
    for check, _, look, needs in CHECKS:
        lacking = [need for need in needs if findings[need].state in ("fault", "skipped")]
        try:
            findings[check] = Finding("skipped", f"needs {', '.join(lacking)}") if lacking else look()
        except FaultError as fault:
            findings[check] = Finding("fault", fault.found, fault.fix)
    return findings


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False) -> None:
    """Check that kernels can be compiled and run here; each fault comes with the command that fixes it.

    Exit code 0, or that of the first fault (a missing GPU is none): 11 Python, 12 torch, 13 CUDA runtime,
    14 cache folder, 15 tvm-ffi, 16 TileLang, 17 host compiler, 18 nvcc, 19 CUDA headers, 20 driver, 21 architecture.
    """
    findings = examine()
    faulty = [code for check, code, *_ in CHECKS if findings[check].state == "fault"]
    if as_json:
        typer.echo(json.dumps([{"check": check, **finding._asdict()} for check, finding in findings.items()], indent=2))
    else:
        for check, (state, found, fix) in findings.items():
            typer.echo(f"{typer.style(f'{state:<8}', _COLORS[state])}{check:<14} {found}")
            if fix:
                typer.echo(f"        {fix}")
        typer.echo(f"{len(faulty)} at fault; run the command under each" if faulty else "no faults")
    raise typer.Exit(faulty[0] if faulty else 0)
