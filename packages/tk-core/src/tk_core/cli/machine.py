"""What `tk doctor` looks at: the packages, the toolchain, the driver and the GPUs of this machine."""

import ctypes
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tk_core import env, faults

Version = tuple[int, int]

MIN_CUDA = (13, 0)


def parse(version: str) -> Version:
    """Major and minor of a version such as 13.2.86 or 2.15.0+cu132."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def pip_install(*requirements: str, options: str = "") -> str:
    """The command that installs requirements into this Python's environment."""
    quoted, python = " ".join(f'"{requirement}"' for requirement in requirements), shlex.quote(sys.executable)
    if importlib.util.find_spec("pip"):
        return f"{python} -m pip install {quoted} {options}".strip()
    return f"uv pip install {quoted} --python {python} {options.replace('--force-reinstall', '--reinstall')}".strip()


class Machine:
    """Facts about a machine; None for what is not there, and of a module why it can't be imported."""

    def __init__(self) -> None:
        self.python = sys.version_info[:3]
        self.os_family = faults.os_family()
        self.torch: ModuleType | Exception = _import("torch")
        self.compat: ModuleType | Exception = _import("tk_core.compat")
        self.tilelang: Exception | None = None
        try:
            self.host_compiler = self.compat.load_tilelang() and self.compat.host_compiler()
        except Exception as error:
            self.tilelang, self.host_compiler = error, shutil.which("g++")
        self.driver_cuda = _driver_cuda()
        cuda = getattr(self.torch, "cuda", None)
        count = cuda.device_count() if cuda else 0
        self.gpus = [(cuda.get_device_name(index), cuda.get_device_capability(index)) for index in range(count)]

    def installed(self, distribution: str) -> str | None:
        """Version of an installed distribution."""
        found = next(importlib.metadata.distributions(name=distribution), None)
        return found and found.version

    @property
    def torch_cuda(self) -> Version | None:
        """CUDA release that torch was built for."""
        version = getattr(self.torch, "version", None)
        return parse(version.cuda) if version and version.cuda else None

    @property
    def nvcc(self) -> Version | None:
        """Release of the CUDA compiler, if it runs."""
        command = f"{shlex.quote(str(self.compat.nvcc_path()))} --version"
        printed = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        return parse(found[1]) if (found := re.search(r"release (\d+\.\d+)", printed)) else None

    @property
    def headers(self) -> Version | None:
        """CUDA release of the headers beside the compiler."""
        header = Path(self.compat.cuda_home() or "", "include", "cuda_runtime_api.h")
        found = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text() if header.exists() else "")
        return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None

    def mend_toolkit(self) -> str:
        """The command that brings a CUDA toolkit whose parts fit together and fit torch."""
        named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
        if named and Path(named) != self.compat.wheel_cuda_home():
            return "unset CUDA_HOME CUDA_PATH"
        major, minor = max(self.torch_cuda or MIN_CUDA, MIN_CUDA)
        wheels = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
        # pip takes an installed wheel for whole, and some of its files may be missing.
        return pip_install(*(f"{x}=={major}.{minor}.*" for x in wheels), options="--force-reinstall --no-deps")


def _import(name: str) -> ModuleType | Exception:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _driver_cuda() -> Version | None:
    """Newest CUDA release that the driver knows."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
