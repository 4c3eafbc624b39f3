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

CODES = {check: code for check, code, *_ in doctor.CHECKS}

# What a fake nvcc does: say its release, and refuse headers of another, as CCCL's headers do.
_NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then
    echo "Cuda compilation tools, release {nvcc}, V{nvcc}.37"
    exit 0
fi
if [ "{nvcc}" != "{headers}" ]; then
    echo 'cuda_toolkit.h(41): fatal error: #error "CUDA compiler and CUDA toolkit headers are incompatible"' >&2
    exit 1
fi
"""

Toolkit = Callable[..., Path]
Look = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module", autouse=True)
def _tilelang() -> None:
    """TileLang settles on a toolkit when it is first imported; that must not be a fake one."""
    compat.load_tilelang()


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """Make a CUDA toolkit and let it be the one from wheels, or with `chosen`, the one that CUDA_HOME names."""

    def make(nvcc: str | None = "13.2", headers: str | None = "13.2", chosen: bool = False) -> Path:
        home = tmp_path / f"cuda-{nvcc}"
        (home / "bin").mkdir(parents=True)
        (home / "include").mkdir()
        if headers is not None:
            major, minor = map(int, headers.split("."))
            text = f"#define CUDART_VERSION  {major * 1000 + minor * 10}\n"
            (home / "include" / "cuda_runtime_api.h").write_text(text)
        if nvcc is not None:
            script = home / "bin" / "nvcc"
            script.write_text(_NVCC.format(nvcc=nvcc, headers=headers))
            script.chmod(0o755)
        if chosen:
            monkeypatch.setenv("CUDA_HOME", str(home))
        else:
            monkeypatch.delenv("CUDA_HOME", raising=False)
            monkeypatch.setattr(compat, "wheel_cuda_home", lambda: home if nvcc else None)
            if nvcc is None:
                monkeypatch.setattr(compat, "cuda_home", lambda: None)
        monkeypatch.delenv("CUDA_PATH", raising=False)
        return home

    return make


@pytest.fixture
def look(toolkit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run `tk doctor` on a machine on which all is well but for the facts given; returns exit code and findings."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TK_ARCH", raising=False)
    installed = {
        "torch": "2.15.0",
        "tilelang": "0.1.15",
        "apache-tvm-ffi": "0.1.12",
        "nvidia-cuda-runtime": "13.2.86",
        "nvidia-cuda-cccl": "13.2.86",
    }
    monkeypatch.setattr(doctor, "installed", installed.get)
    loaded = compat.load_tilelang()

    def pretend(module: Any, function: str, result: Any) -> None:
        """Let a function return something, or raise it."""

        def fake() -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(module, function, fake)

    def run(
        without: str | None = None,
        versions: dict[str, str] | None = None,
        python: str = "3.11.7",
        torch_cuda: str | Exception | None = "13.2",
        tilelang: Any = loaded,
        driver_cuda: str | None = "13.2",
        gpus: tuple[tuple[str, int, int], ...] = (("NVIDIA H200", 9, 0),),
        host_compiler: str | None = sys.executable,
        os_family: str = "ubuntu debian",
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        if not list(tmp_path.glob("cuda-*")):
            toolkit()
        installed.update(versions or {})
        installed.pop(without, None)
        pretend(doctor.platform, "python_version", python)
        pretend(doctor, "torch_cuda", Version(torch_cuda) if isinstance(torch_cuda, str) else torch_cuda)
        pretend(compat, "load_tilelang", tilelang)
        pretend(doctor, "driver_cuda", Version(driver_cuda) if driver_cuda else None)
        pretend(torch.cuda, "device_count", len(gpus))
        properties = [SimpleNamespace(name=name, major=major, minor=minor) for name, major, minor in gpus]
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        pretend(compat, "host_compiler", host_compiler)
        pretend(faults, "os_family", os_family)
        result = CliRunner().invoke(app, ["doctor", "--json"])
        findings = {finding["check"]: finding for finding in json.loads(result.output)}
        assert list(findings) == list(CODES)
        text = CliRunner().invoke(app, ["doctor"])
        assert text.exit_code == result.exit_code
        for finding in findings.values():
            assert finding["found"] in text.output
            assert (finding["fix"] or "") in text.output, "a command must not be wrapped"
        return result.exit_code, findings

    return run


def _only_fault(result: tuple[int, dict[str, dict[str, Any]]], check: str) -> dict[str, Any]:
    """The finding of `check`, which is the first fault; the exit code must say so and every fault must have a fix."""
    code, findings = result
    faults = [name for name, finding in findings.items() if finding["state"] == "fault"]
    assert faults[:1] == [check], findings
    assert code == CODES[check]
    assert all(findings[name]["fix"] for name in faults)
    return findings[check]


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


def test_nothing_here_is_a_gpu_is_a_note(look: Look) -> None:
    code, findings = look(driver_cuda=None, gpus=())
    assert code == 0
    assert findings["driver"]["state"] == findings["architecture"]["state"] == "note"
    assert "--arch" in findings["architecture"]["found"]


def test_this_machine_compiles_the_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    findings = doctor.examine()
    assert findings["nvcc"].state == "ok", findings["nvcc"]
    assert findings["CUDA headers"].state == "ok", findings["CUDA headers"]


def test_nvcc_newer_than_headers(look: Look, toolkit: Toolkit) -> None:
    toolkit(nvcc="13.5", headers="13.2")
    fault = _only_fault(look(), "CUDA headers")
    assert "nvcc 13.5" in fault["found"]
    assert "headers 13.2" in fault["found"]
    assert "nvcc is newer than the CUDA headers" in fault["found"]
    assert "CUDA compiler and CUDA toolkit headers are incompatible" in fault["found"]
    wheels = '"nvidia-cuda-nvcc==13.2.*" "nvidia-cuda-crt==13.2.*" "nvidia-nvvm==13.2.*"'
    assert f"pip install {wheels}" in fault["fix"]


def test_headers_newer_than_torch(look: Look, toolkit: Toolkit) -> None:
    toolkit(nvcc="13.2", headers="13.5")
    result = look(versions={"nvidia-cuda-runtime": "13.5.10"})
    fault = _only_fault(result, "CUDA runtime")
    assert '"nvidia-cuda-runtime==13.2.*"' in fault["fix"]
    headers = result[1]["CUDA headers"]
    assert headers["state"] == "fault"
    assert "nvcc is older than the CUDA headers" in headers["found"]
    assert '"nvidia-cuda-runtime==13.2.*"' in headers["fix"]


def test_pins_follow_torch(look: Look, toolkit: Toolkit) -> None:
    toolkit(nvcc="13.5", headers="13.0")
    versions = {"torch": "2.11.0+cu130", "nvidia-cuda-runtime": "13.0.96"}
    fault = _only_fault(look(torch_cuda="13.0", versions=versions), "CUDA headers")
    assert '"nvidia-cuda-nvcc==13.0.*"' in fault["fix"]


def test_two_releases_that_compile_are_a_note(look: Look, toolkit: Toolkit) -> None:
    home = toolkit(nvcc="13.2", headers="13.2")
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13010\n")
    code, findings = look()
    assert code == 0
    assert findings["CUDA headers"]["state"] == "note"


def test_no_headers(look: Look, toolkit: Toolkit) -> None:
    toolkit(headers=None)
    fault = _only_fault(look(), "CUDA headers")
    assert "no cuda_runtime_api.h" in fault["found"]
    assert '"nvidia-cuda-runtime==13.2.*" "nvidia-cuda-cccl==13.2.*"' in fault["fix"]
    assert "reinstall" in fault["fix"]


def test_an_nvcc_that_finds_its_headers_elsewhere(look: Look, toolkit: Toolkit) -> None:
    (toolkit() / "include" / "cuda_runtime_api.h").unlink()
    code, findings = look()
    assert code == 0
    assert findings["CUDA headers"]["state"] == "ok"


def test_headers_without_cccl(look: Look, toolkit: Toolkit) -> None:
    script = toolkit() / "bin" / "nvcc"
    message = "probe.cu:2:10: fatal error: cuda/std/cstdint: No such file or directory"
    script.write_text(f"{script.read_text()}echo '{message}' >&2\nexit 1\n")
    fault = _only_fault(look(), "CUDA headers")
    assert "cuda/std/cstdint: No such file" in fault["found"]
    assert '"nvidia-cuda-cccl==13.2.*"' in fault["fix"]


def test_no_nvcc(look: Look, toolkit: Toolkit) -> None:
    toolkit(nvcc=None)
    result = look()
    fault = _only_fault(result, "nvcc")
    assert '"nvidia-cuda-nvcc==13.2.*"' in fault["fix"]
    assert result[1]["CUDA headers"]["state"] == "skipped"


@pytest.mark.parametrize("nvcc", ["11.8", "12.9"])
def test_old_nvcc(look: Look, toolkit: Toolkit, nvcc: str) -> None:
    toolkit(nvcc=nvcc, headers=nvcc)
    fault = _only_fault(look(), "nvcc")
    assert f"{nvcc} at " in fault["found"]
    assert '"nvidia-cuda-nvcc==13.2.*"' in fault["fix"]


def test_old_nvcc_in_cuda_home(look: Look, toolkit: Toolkit) -> None:
    toolkit()
    toolkit(nvcc="12.4", headers="12.4", chosen=True)
    assert _only_fault(look(), "nvcc")["fix"] == "unset CUDA_HOME CUDA_PATH"


def test_cuda_home_without_a_toolkit(look: Look, toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit()
    monkeypatch.setenv("CUDA_HOME", "/nonexistent/cuda")
    fault = _only_fault(look(), "nvcc")
    assert "/nonexistent/cuda" in fault["found"]
    assert fault["fix"] == "unset CUDA_HOME CUDA_PATH"


def test_nvcc_that_does_not_run(look: Look, toolkit: Toolkit) -> None:
    (toolkit() / "bin" / "nvcc").write_text("#!/bin/sh\nexit 127\n")
    fault = _only_fault(look(), "nvcc")
    assert "does not run" in fault["found"]


@pytest.mark.parametrize(
    ("os_family", "fix"), [("ubuntu debian", "sudo apt-get install --yes g++"), ("rocky rhel fedora", "gcc-c++")]
)
def test_no_host_compiler(look: Look, os_family: str, fix: str) -> None:
    fault = _only_fault(look(host_compiler=None, os_family=os_family), "host compiler")
    assert fix in fault["fix"]


def test_host_compiler_that_is_not_there(look: Look) -> None:
    result = look(host_compiler="/nonexistent/g++")
    fault = _only_fault(result, "host compiler")
    assert "/nonexistent/g++" in fault["found"]
    assert fault["fix"] == "unset CXX CC", "installing another would not help"
    assert result[1]["CUDA headers"]["state"] == "skipped"


def test_no_torch(look: Look) -> None:
    code, findings = look(without="torch", torch_cuda=ModuleNotFoundError("No module named 'torch'"))
    assert code == CODES["torch"]
    assert 'pip install "torch>=2.10"' in findings["torch"]["fix"]
    states = {check: finding["state"] for check, finding in findings.items()}
    assert states["nvcc"] == states["TileLang"] == states["architecture"] == "skipped"


def test_torch_that_can_not_be_imported(look: Look) -> None:
    code, findings = look(torch_cuda=OSError("libcudart.so.13: cannot open shared object file"))
    assert code == CODES["torch"]
    assert "libcudart.so.13" in findings["torch"]["found"]
    assert '"torch==2.15.0"' in findings["torch"]["fix"]


def test_old_torch(look: Look) -> None:
    result = look(versions={"torch": "2.9.1+cu130"}, torch_cuda="13.0")
    assert '"torch>=2.10"' in _only_fault(result, "torch")["fix"]


def test_torch_without_cuda_where_there_is_no_gpu(look: Look) -> None:
    code, findings = look(versions={"torch": "2.15.0+cpu"}, torch_cuda=None, driver_cuda=None, gpus=())
    assert code == 0
    assert findings["torch"]["state"] == "note"
    assert "references and compiling ahead work" in findings["torch"]["found"]
    assert findings["torch"]["fix"] is None
    assert findings["CUDA runtime"]["state"] == "skipped"


def test_torch_without_cuda_beside_a_driver(look: Look) -> None:
    result = look(versions={"torch": "2.15.0+cpu"}, torch_cuda=None, gpus=())
    fault = _only_fault(result, "torch")
    assert '"torch==2.15.0"' in fault["fix"]
    assert "reinstall" in fault["fix"], "2.15.0+cpu satisfies torch==2.15.0"
    assert result[1]["CUDA runtime"]["state"] == "skipped"


def test_torch_of_an_older_cuda(look: Look) -> None:
    """torch 2.10, which the packages' bounds allow, is for CUDA 12.8 on the public index."""
    torch = {"versions": {"torch": "2.10.0+cu128"}, "torch_cuda": "12.8"}
    code, findings = look(**torch)
    assert code == 0
    assert findings["CUDA runtime"]["state"] == "note"
    assert "torch's is 12.8; kernels are compiled for 13.2" in findings["CUDA runtime"]["found"]
    assert "580" in _only_fault(look(**torch, driver_cuda="12.8"), "driver")["fix"]


def test_cuda_runtime_that_is_not_from_wheels(look: Look) -> None:
    code, findings = look(without="nvidia-cuda-runtime")
    assert code == 0
    assert findings["CUDA runtime"]["state"] == "skipped"


def test_no_tilelang(look: Look) -> None:
    result = look(without="tilelang")
    assert f'pip install "tilelang{compat.SUPPORTED_TILELANG}"' in _only_fault(result, "TileLang")["fix"]
    assert result[1]["tvm-ffi"]["state"] == "skipped"


@pytest.mark.parametrize("version", ["0.1.9", "0.2.0", "1.0"])
def test_tilelang_out_of_range(look: Look, version: str) -> None:
    fault = _only_fault(look(versions={"tilelang": version}), "TileLang")
    assert version in fault["found"]
    assert f'pip install "tilelang{compat.SUPPORTED_TILELANG}"' in fault["fix"]


def test_tilelang_that_can_not_be_imported(look: Look) -> None:
    fault = _only_fault(look(tilelang=ImportError("undefined symbol: TVMFFI")), "TileLang")
    assert "undefined symbol: TVMFFI" in fault["found"]


def test_tvm_ffi_out_of_range(look: Look) -> None:
    fault = _only_fault(look(versions={"apache-tvm-ffi": "0.9.0"}), "tvm-ffi")
    assert 'pip install "apache-tvm-ffi' in fault["fix"]


def test_no_tvm_ffi(look: Look) -> None:
    assert "not installed" in _only_fault(look(without="apache-tvm-ffi"), "tvm-ffi")["found"]


def test_old_python(look: Look) -> None:
    assert "uv venv --python 3.13" in _only_fault(look(python="3.10.4"), "Python")["fix"]


def test_old_driver(look: Look) -> None:
    fault = _only_fault(look(driver_cuda="12.8"), "driver")
    assert "12.8" in fault["found"]
    assert "580" in fault["fix"]


def test_driver_of_an_earlier_minor_release_is_fine(look: Look) -> None:
    assert look(driver_cuda="13.0")[0] == 0


def test_gpu_without_kernels(look: Look) -> None:
    fault = _only_fault(look(gpus=(("Tesla V100", 7, 0),)), "architecture")
    assert "sm_70" in fault["found"]
    assert fault["fix"] == "export TK_BACKEND=reference"


def test_one_gpu_of_two_without_kernels(look: Look) -> None:
    fault = _only_fault(look(gpus=(("Tesla V100", 7, 0), ("NVIDIA H200", 9, 0))), "architecture")
    assert fault["fix"] == "export CUDA_VISIBLE_DEVICES=1"


def test_unknown_tk_arch(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_ARCH", "sm_42")
    assert _only_fault(look(), "architecture")["fix"] == "unset TK_ARCH"


def test_cache_folder_that_can_not_be_written(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file"))
    fault = _only_fault(look(), "cache folder")
    assert str(tmp_path / "file") in fault["found"]
    assert fault["fix"].startswith("export TILELANG_CACHE_DIR=")


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, in which nothing can be written."""
    folder, access = tmp_path / "cache", os.access
    folder.mkdir()

    def refuse(**_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(faults.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    return folder


def _add_kernel(cache: Path) -> None:
    library = cache / "0.1.15" / "linux-x86_64" / "kernels" / "key" / "executable.so"
    library.parent.mkdir(parents=True)
    library.touch()


def test_read_only_cache_with_kernels_is_a_note(look: Look, read_only: Path) -> None:
    _add_kernel(read_only)
    code, findings = look()
    assert code == 0
    assert findings["cache folder"] == {
        "check": "cache folder",
        "state": "note",
        "found": f"{read_only} is read-only: its 1 kernels can be loaded, but no others can be compiled",
        "fix": None,
    }
    assert findings["TileLang"]["state"] == "ok"


def test_read_only_cache_that_tilelang_can_not_load(look: Look, read_only: Path) -> None:
    """Without a folder .staging in it, TileLang can't be imported."""
    _add_kernel(read_only)
    error = faults.unwritable_cache(read_only, "Read-only file system")
    fault = _only_fault(look(tilelang=error), "TileLang")
    assert (fault["found"], fault["fix"]) == (error.found, error.fix)


def test_read_only_cache_without_kernels(look: Look, read_only: Path) -> None:
    fault = _only_fault(look(), "cache folder")
    assert fault["found"].endswith("can't be written: Read-only file system")
    assert fault["fix"].startswith("export TILELANG_CACHE_DIR=")


def test_cache_on_a_full_disk(look: Look, read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read-only, so that kernels were meant to be added."""
    _add_kernel(read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    _only_fault(look(), "cache folder")


def test_pip_install_names_the_environment() -> None:
    command = doctor.pip_install("a>=1", "b==2.*")
    assert 'pip install "a>=1" "b==2.*"' in command
    assert sys.executable in command
