"""`tk doctor` on simulated faults: what it says, the command that mends it, and the exit code."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

from tk_core import compat, faults
from tk_core.cli import app, doctor
from tk_core.faults import FaultError

CODES = {check: code for check, code, *_ in doctor.CHECKS}

# What a fake nvcc does: say its release, and refuse headers of another, as CCCL's headers do.
_NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then
    echo "Cuda compilation tools, release {nvcc}, V{nvcc}.37"
elif [ "{nvcc}" != "{headers}" ]; then
    echo 'cuda_toolkit.h(41): fatal error: #error "CUDA compiler and CUDA toolkit headers are incompatible"' >&2
    exit 1
fi
"""
_NO_CCCL = "probe.cu:2:10: fatal error: cuda/std/cstdint: No such file or directory"

INSTALLED = {
    "torch": "2.15.0",
    "tilelang": "0.1.15",
    "apache-tvm-ffi": "0.1.12",
    "nvidia-cuda-runtime": "13.2.86",
    "nvidia-cuda-cccl": "13.2.86",
}
H200, V100 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0), SimpleNamespace(name="Tesla V100", major=7, minor=0)
Findings = dict[str, dict[str, Any]]
Look = Callable[..., tuple[int, Findings]]


def make_toolkit(
    home: Path, nvcc: str | None = "13.2", headers: str | None = "13.2", header: str | None = None, script: str = ""
) -> Path:
    """A CUDA toolkit: releases of its nvcc and of its headers, what its header says, what its nvcc adds."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    if said := header if header is not None else headers:
        major, minor = map(int, said.split("."))
        text = f"#define CUDART_VERSION  {major * 1000 + minor * 10}\n"
        (home / "include" / "cuda_runtime_api.h").write_text(text)
    if nvcc:
        file = home / "bin" / "nvcc"
        file.write_text(_NVCC.format(nvcc=nvcc, headers=headers) + script)
        file.chmod(0o755)
    return home


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run `tk doctor` on a machine on which all is well but for the facts given; returns exit code and findings."""
    loaded = compat.load_tilelang()  # it settles on a toolkit when it is first imported; not on a fake one

    def pretend(module: Any, function: str, result: Any) -> None:
        """Let a function return something, or raise it."""

        def fake() -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(module, function, fake)

    def run(
        installed: dict[str, str | None] | None = None,
        python: str = "3.11.7",
        torch_cuda: str | Exception | None = "13.2",
        tilelang: Any = loaded,
        driver_cuda: str | None = "13.2",
        gpus: tuple[Any, ...] = (H200,),
        host_compiler: str | None = sys.executable,
        os_family: str = "ubuntu debian",
        toolkit: dict[str, str | None] | None = None,
        env: dict[str, str] | None = None,
        cache: str = "",
        kernels: int = 0,
    ) -> tuple[int, Findings]:
        monkeypatch.setattr(doctor, "installed", (INSTALLED | (installed or {})).get)
        pretend(doctor.platform, "python_version", python)
        pretend(doctor, "torch_cuda", Version(torch_cuda) if isinstance(torch_cuda, str) else torch_cuda)
        pretend(compat, "load_tilelang", tilelang)
        pretend(compat, "tilelang_version", (INSTALLED | (installed or {}))["tilelang"])
        pretend(doctor, "driver_cuda", Version(driver_cuda) if driver_cuda else None)
        pretend(torch.cuda, "device_count", len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
        pretend(compat, "host_compiler", host_compiler)
        pretend(faults, "os_family", os_family)
        home = make_toolkit(tmp_path / "cuda", **toolkit or {})
        make_toolkit(tmp_path / "old-cuda", nvcc="12.4", headers="12.4")
        (tmp_path / "file").touch()
        pretend(compat, "wheel_cuda_home", home if (home / "bin" / "nvcc").exists() else None)
        if toolkit and "nvcc" in toolkit and toolkit["nvcc"] is None:
            pretend(compat, "cuda_home", None)
        for name in ("CUDA_HOME", "CUDA_PATH", "TK_ARCH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TILELANG_CACHE_DIR": str(tmp_path / "cache"), **(env or {})}.items():
            monkeypatch.setenv(name, value.format(tmp=tmp_path))
        for number in range(kernels):
            library = tmp_path / "cache" / "0.1.15" / "linux-x86_64" / "kernels" / str(number) / "executable.so"
            library.parent.mkdir(parents=True)
            library.touch()
        if cache:
            fail_writes(cache)
        result = CliRunner().invoke(app, ["doctor", "--json"])
        findings = {finding["check"]: finding for finding in json.loads(result.output)}
        assert list(findings) == list(CODES)
        text = CliRunner().invoke(app, ["doctor"])
        assert text.exit_code == result.exit_code
        for finding in findings.values():
            assert finding["found"] in text.output
            assert (finding["fix"] or "") in text.output, "a command must not be wrapped"
        return result.exit_code, findings

    def fail_writes(why: str) -> None:
        def refuse(**_: Any) -> None:
            raise OSError(30, why)

        access = os.access
        monkeypatch.setattr(faults.tempfile, "TemporaryFile", refuse)
        if why == "Read-only file system":
            monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))

    return run


def test_healthy(look: Look) -> None:
    code, findings = look()
    assert code == 0
    assert {finding["state"] for finding in findings.values()} == {"ok"}
    assert "13.2" in findings["nvcc"]["found"]


def test_exit_codes_are_told_apart_and_documented() -> None:
    assert len(set(CODES.values())) == len(CODES)
    assert not {0, 1, 2} & set(CODES.values()), "these are success, a crash and a usage error"
    for check, code in CODES.items():
        assert f"{code} {check}" in doctor.doctor.__doc__


def test_this_machine_compiles_the_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    findings = doctor.examine()
    assert findings["nvcc"].state == "ok", findings["nvcc"]
    assert findings["CUDA headers"].state == "ok", findings["CUDA headers"]


def test_pip_install_names_the_environment() -> None:
    command = doctor.pip_install("a>=1", "b==2.*")
    assert 'pip install "a>=1" "b==2.*"' in command
    assert sys.executable in command


_CPU_TORCH = {"installed": {"torch": "2.15.0+cpu"}, "torch_cuda": None}
# What the packages' bounds allow and the public index has: torch 2.10 for CUDA 12.8.
_OLD_CUDA = {"installed": {"torch": "2.10.0+cu128"}, "torch_cuda": "12.8"}
_READ_ONLY = {"cache": "Read-only file system"}
# What vLLM and SGLang pin, on a machine without compilers.
_ENGINE = {"installed": {"tilelang": "0.1.12"}, "host_compiler": None, "toolkit": {"nvcc": None}}
_NO_KERNELS_ELSE = "is read-only: its 1 kernels can be loaded, but no others can be compiled"

# Facts that are no fault: the facts, a check, its state, and what it says.
NO_FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no-driver": ({"driver_cuda": None, "gpus": ()}, "driver", "note", "no NVIDIA driver here"),
    "no-gpu": ({"driver_cuda": None, "gpus": ()}, "architecture", "note", "--arch"),
    "earlier-driver": ({"driver_cuda": "13.0"}, "driver", "ok", "13.0"),
    "two-releases-that-compile": ({"toolkit": {"header": "13.1"}}, "CUDA headers", "note", "though a probe compiles"),
    "headers-elsewhere": ({"toolkit": {"header": ""}}, "CUDA headers", "ok", "no cuda_runtime_api.h beside it"),
    "cpu-torch": (
        *({**_CPU_TORCH, "driver_cuda": None, "gpus": ()}, "torch", "note"),
        "references and compiling ahead work",
    ),
    "cpu-torch-runtime": ({**_CPU_TORCH, "driver_cuda": None, "gpus": ()}, "CUDA runtime", "skipped", ""),
    "older-cuda": (_OLD_CUDA, "CUDA runtime", "note", "torch's is 12.8; kernels are compiled for 13.2"),
    "no-runtime-wheel": ({"installed": {"nvidia-cuda-runtime": None}}, "CUDA runtime", "skipped", "not from wheels"),
    "read-only-cache": ({**_READ_ONLY, "kernels": 1}, "cache folder", "note", _NO_KERNELS_ELSE),
    "tilelang-that-only-loads": (
        *(_ENGINE, "TileLang", "note"),
        "0.1.12 compiles no kernels, but loads those of 0.1.15",
    ),
    "no-compiler-asked-for": (_ENGINE, "host compiler", "skipped", "loaded here"),
    "no-nvcc-asked-for": (_ENGINE, "nvcc", "skipped", "loaded here"),
    "no-headers-asked-for": (_ENGINE, "CUDA headers", "skipped", "needs host compiler, nvcc"),
    "tk-arch": ({"env": {"TK_ARCH": "sm_100"}}, "architecture", "ok", "sm_100a, by TK_ARCH"),
}


@pytest.mark.parametrize("name", NO_FAULTS)
def test_no_fault(look: Look, name: str) -> None:
    facts, check, state, found = NO_FAULTS[name]
    code, findings = look(**facts)
    assert code == 0
    assert (findings[check]["state"], findings[check]["fix"]) == (state, None)
    assert found in findings[check]["found"]


_WHEELS = 'pip install "nvidia-cuda-nvcc==13.2.*" "nvidia-cuda-crt==13.2.*" "nvidia-nvvm==13.2.*"'
_RUNTIME = '"nvidia-cuda-runtime==13.2.*" "nvidia-cuda-cccl==13.2.*"'
_TILELANG = f'pip install "tilelang{compat.LOADING_TILELANG}"'
_NO_VARIABLES = "unset CUDA_HOME CUDA_PATH"
_INCOMPATIBLE = "CUDA compiler and CUDA toolkit headers are incompatible"
_NEWER = "nvcc 13.5, headers 13.2: nvcc is newer than the CUDA headers: "
_TOO_NEW = {"toolkit": {"headers": "13.5"}, "installed": {"nvidia-cuda-runtime": "13.5.10"}}
_TORCH_2_11 = {"torch_cuda": "13.0", "installed": {"torch": "2.11.0+cu130", "nvidia-cuda-runtime": "13.0.96"}}

# The facts, the first check at fault, what it says, and what is in the command that mends it.
FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "old-python": ({"python": "3.10.4"}, "Python", "3.10.4", "uv venv --python 3.13"),
    "no-torch": (
        *({"installed": {"torch": None}, "torch_cuda": ModuleNotFoundError("No module named 'torch'")}, "torch"),
        *("not installed", 'pip install "torch>=2.10"'),
    ),
    "broken-torch": ({"torch_cuda": OSError("libcudart.so.13: no")}, "torch", "libcudart.so.13", '"torch==2.15.0"'),
    "old-torch": ({"installed": {"torch": "2.9.1+cu130"}, "torch_cuda": "13.0"}, "torch", "2.9.1", '"torch>=2.10"'),
    # 2.15.0+cpu satisfies torch==2.15.0.
    "cpu-torch-beside-a-driver": (_CPU_TORCH, "torch", "without CUDA", '"torch==2.15.0" --force-reinstall'),
    "newer-runtime": (_TOO_NEW, "CUDA runtime", "13.5.10", '"nvidia-cuda-runtime==13.2.*"'),
    "cache-is-a-file": (
        *({"env": {"TILELANG_CACHE_DIR": "{tmp}/file"}}, "cache folder"),
        *("/file, can't be written: ", "export TILELANG_CACHE_DIR="),
    ),
    "read-only-cache-without-kernels": (
        *(_READ_ONLY, "cache folder"),
        *("can't be written: Read-only file system", "export TILELANG_CACHE_DIR="),
    ),
    # It is not read-only, so kernels were meant to be added.
    "full-disk": (
        *({"cache": "No space left on device", "kernels": 1}, "cache folder"),
        *("can't be written: No space left on device", "export TILELANG_CACHE_DIR="),
    ),
    "other-tvm-ffi": (
        *({"installed": {"apache-tvm-ffi": "0.9.0"}}, "tvm-ffi"),
        *("0.9.0", 'pip install "apache-tvm-ffi'),
    ),
    "no-tvm-ffi": ({"installed": {"apache-tvm-ffi": None}}, "tvm-ffi", "not installed", "pip install"),
    "no-tilelang": ({"installed": {"tilelang": None}}, "TileLang", "not installed", _TILELANG),
    "tilelang-0.1.9": ({"installed": {"tilelang": "0.1.9"}}, "TileLang", "0.1.9", _TILELANG),
    "tilelang-0.2.0": ({"installed": {"tilelang": "0.2.0"}}, "TileLang", "0.2.0", _TILELANG),
    "tilelang-1.0": ({"installed": {"tilelang": "1.0"}}, "TileLang", "1.0", _TILELANG),
    "broken-tilelang": ({"tilelang": ImportError("undefined symbol")}, "TileLang", "undefined symbol", "--no-deps"),
    # Without a folder .staging in a read-only cache, TileLang can't be imported.
    "tilelang-says-why": (
        *({**_READ_ONLY, "kernels": 1, "tilelang": FaultError("no .staging", "export X=y")}, "TileLang"),
        *("no .staging", "export X=y"),
    ),
    "no-compiler": ({"host_compiler": None}, "host compiler", "no g++", "sudo apt-get install --yes g++"),
    "no-compiler-rhel": ({"host_compiler": None, "os_family": "rocky rhel"}, "host compiler", "no g++", "gcc-c++"),
    # To install another would not help.
    "compiler-not-there": ({"host_compiler": "/nowhere/g++"}, "host compiler", "/nowhere/g++", "unset CXX CC"),
    "no-nvcc": ({"toolkit": {"nvcc": None}}, "nvcc", "none in any CUDA toolkit", _WHEELS),
    "nvcc-11": ({"toolkit": {"nvcc": "11.8", "headers": "11.8"}}, "nvcc", "11.8 at ", _WHEELS),
    "nvcc-12": ({"toolkit": {"nvcc": "12.9", "headers": "12.9"}}, "nvcc", "12.9 at ", _WHEELS),
    "old-cuda-home": ({"env": {"CUDA_HOME": "{tmp}/old-cuda"}}, "nvcc", "12.4 at ", _NO_VARIABLES),
    "no-cuda-home": ({"env": {"CUDA_HOME": "/nowhere/cuda"}}, "nvcc", "/nowhere/cuda", _NO_VARIABLES),
    "broken-nvcc": ({"toolkit": {"nvcc": "x"}}, "nvcc", "does not run", _WHEELS),
    "newer-nvcc": ({"toolkit": {"nvcc": "13.5"}}, "CUDA headers", _NEWER, f"{_WHEELS} {_RUNTIME}"),
    "newer-nvcc-error": ({"toolkit": {"nvcc": "13.5"}}, "CUDA headers", _INCOMPATIBLE, "--force-reinstall --no-deps"),
    # The release is torch's.
    "newer-nvcc-torch-2.11": (
        *({**_TORCH_2_11, "toolkit": {"nvcc": "13.5", "headers": "13.0"}}, "CUDA headers"),
        *("newer", '"nvidia-cuda-nvcc==13.0.*"'),
    ),
    "no-headers": ({"toolkit": {"headers": None}}, "CUDA headers", "no cuda_runtime_api.h", _RUNTIME),
    "no-cccl": (
        *({"toolkit": {"script": f"echo '{_NO_CCCL}' >&2; exit 1"}}, "CUDA headers"),
        *("cuda/std/cstdint: No such file", _RUNTIME),
    ),
    "old-driver": ({"driver_cuda": "12.8"}, "driver", "12.8", "580"),
    "old-driver-older-cuda": ({**_OLD_CUDA, "driver_cuda": "12.8"}, "driver", "12.8", "580"),
    "old-gpu": ({"gpus": (V100,)}, "architecture", "sm_70", "export TK_BACKEND=reference"),
    "one-old-gpu": ({"gpus": (V100, H200)}, "architecture", "sm_70", "export CUDA_VISIBLE_DEVICES=1"),
    "unknown-tk-arch": ({"env": {"TK_ARCH": "sm_42"}}, "architecture", "sm_42", "unset TK_ARCH"),
}
# What can't be looked at beside a fault.
SKIPPED = {
    "torch": ["CUDA runtime", "TileLang", "host compiler", "nvcc", "CUDA headers", "architecture"],
    "TileLang": ["host compiler", "CUDA headers"],
    "host compiler": ["CUDA headers"],
    "nvcc": ["CUDA headers"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(look: Look, name: str) -> None:
    facts, check, found, fix = FAULTS[name]
    code, findings = look(**facts)
    faulty = [name for name, finding in findings.items() if finding["state"] == "fault"]
    assert faulty[:1] == [check], findings
    assert code == CODES[check]
    assert all(findings[name]["fix"] for name in faulty)
    assert found in findings[check]["found"]
    assert fix in findings[check]["fix"]
    skipped = [name for name, finding in findings.items() if finding["state"] == "skipped"]
    assert skipped == ["tvm-ffi"] * (name == "no-tilelang") + SKIPPED.get(check, [])


def test_headers_newer_than_torch_are_a_second_fault(look: Look) -> None:
    headers = look(**_TOO_NEW)[1]["CUDA headers"]
    assert headers["state"] == "fault"
    assert "nvcc is older than the CUDA headers" in headers["found"]
    assert '"nvidia-cuda-runtime==13.2.*"' in headers["fix"]
