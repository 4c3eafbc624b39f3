"""What `tk doctor` looks at: the toolchain, the driver and the folders of this machine."""

import ctypes
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tk_core import faults

if TYPE_CHECKING:
    from types import ModuleType

Version = tuple[int, int]

MIN_CUDA = (13, 0)
DEFAULT_CUDA = (13, 2)


class SkipError(Exception):
    """A check that an earlier fault makes pointless."""


def release(version: Version) -> str:
    """A version as people write it."""
    return f"{version[0]}.{version[1]}"


def parse(version: str) -> Version:
    """Major and minor of a version such as 13.2.86 or 2.15.0+cu132."""
    major, minor, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(major), int(minor)


def pip_install(*requirements: str, options: str = "") -> str:
    """The command that installs requirements into this Python's environment."""
    quoted = " ".join(f'"{requirement}"' for requirement in requirements)
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip"):
        return f"{python} -m pip install {options}{quoted}"
    return f"uv pip install {options.replace('--force-reinstall', '--reinstall')}{quoted} --python {python}"


class Machine:
    """What the checks look at; each fact is found out once. Tests replace facts by setting attributes."""

    def installed(self, distribution: str) -> str | None:
        """Version of an installed distribution."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    @cached_property
    def python(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    @cached_property
    def torch(self) -> "ModuleType | Exception":
        """The module, or why it can't be imported."""
        try:
            import torch
        except Exception as error:
            return error
        return torch

    @cached_property
    def torch_cuda(self) -> Version | None:
        """CUDA release that torch was built for; None without a CUDA build of torch."""
        found = getattr(getattr(self.torch, "version", None), "cuda", None)
        return parse(found) if found else None

    @cached_property
    def wanted_cuda(self) -> Version:
        """CUDA release that compiler and headers should be of."""
        return self.torch_cuda if self.torch_cuda and self.torch_cuda >= MIN_CUDA else DEFAULT_CUDA

    @cached_property
    def compat(self) -> "ModuleType":
        if isinstance(self.torch, Exception):
            raise SkipError("needs torch")
        from tk_core import compat

        return compat

    @cached_property
    def tilelang(self) -> "ModuleType | Exception":
        """The module, or why it can't be imported."""
        try:
            return self.compat.load_tilelang()
        except Exception as error:
            return error

    @cached_property
    def cuda_home(self) -> Path | None:
        return self.compat.cuda_home()

    @cached_property
    def cuda_home_is_chosen(self) -> bool:
        """Whether the user named the toolkit, rather than leaving it to us."""
        from tk_core import env

        named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
        return named is not None and Path(named) != self.compat.wheel_cuda_home()

    @cached_property
    def nvcc(self) -> Version:
        """Release of the CUDA compiler. Raises SkipError if the check of nvcc has nothing to go on."""
        path = self.compat.nvcc_path()
        if path is None:
            raise SkipError("needs nvcc")
        try:
            printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise SkipError(f"needs an nvcc that runs ({error})") from error
        found = re.search(r"release (\d+)\.(\d+)", printed.stdout)
        if printed.returncode or not found:
            raise SkipError("needs an nvcc that runs")
        return int(found[1]), int(found[2])

    @cached_property
    def host_compiler(self) -> str | None:
        if isinstance(self.tilelang, Exception):
            return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
        return self.compat.host_compiler()

    @cached_property
    def headers(self) -> Version | None:
        """CUDA release of the headers that go with nvcc."""
        for folder in ("include", *(f"targets/{name}/include" for name in ("x86_64-linux", "sbsa-linux"))):
            header = self.cuda_home / folder / "cuda_runtime_api.h" if self.cuda_home else None
            if header and header.exists():
                version = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
                if version:
                    return int(version[1]) // 1000, int(version[1]) % 1000 // 10
        return None

    @cached_property
    def driver_cuda(self) -> Version | None:
        """Newest CUDA release that the driver knows; None without an NVIDIA driver."""
        try:
            driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
            failed = driver.cuDriverGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            return None
        return None if failed else (version.value // 1000, version.value % 1000 // 10)

    @cached_property
    def gpus(self) -> list[tuple[str, Version]]:
        """Name and compute capability of each GPU that torch can use."""
        torch = self.torch
        if isinstance(torch, Exception) or not torch.cuda.is_available():
            return []
        count = torch.cuda.device_count()
        return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]

    @cached_property
    def cache_fault(self) -> faults.FaultError | None:
        """Why nothing can be written to the cache folder; None if it can."""
        return faults.cache_fault(self.compat.cache_dir())

    @cached_property
    def os_family(self) -> str:
        """Names that the distribution goes by."""
        return faults.os_family()

    def probe_command(self, source: Path, output: Path) -> list[str]:
        """The compiler, host compiler and include paths that TileLang would use on `source`."""
        includes = []
        if not isinstance(self.tilelang, Exception):
            from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

            includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR) if path]
        return [
            *(str(self.compat.nvcc_path()), f"-ccbin={self.host_compiler}", "--cubin", "-O3", "-w"),
            *("-arch=sm_90a", "-std=c++20", *includes, "-o", str(output), str(source)),
        ]

    def compiler_wheels(self) -> list[str]:
        """Requirements that bring compiler and headers to torch's CUDA release."""
        pin = f"=={release(self.wanted_cuda)}.*"
        wheels = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"]
        if not (self.installed("nvidia-cuda-runtime") or "").startswith(f"{release(self.wanted_cuda)}."):
            wheels.append("nvidia-cuda-runtime")
        if self.installed("nvidia-cuda-cccl") is None:
            wheels.append("nvidia-cuda-cccl")
        return [f"{wheel}{pin}" for wheel in wheels]

    def mend_toolkit(self) -> str:
        """The command that brings a CUDA toolkit whose parts fit together."""
        install = pip_install(*self.compiler_wheels())
        if not self.cuda_home_is_chosen:
            return install
        return "unset CUDA_HOME CUDA_PATH" if self.compat.wheel_cuda_home() else f"unset CUDA_HOME CUDA_PATH; {install}"
