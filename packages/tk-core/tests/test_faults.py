"""What a machine lacks for compiling is said in one sentence with the command that mends it, never with CUDA source."""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tk_core import compat, faults
from tk_core.arch import Arch, arch_from_name
from tk_core.faults import FaultError
from tk_core.kernel import kernel

SM_90A = arch_from_name("sm_90a")

pytestmark = pytest.mark.compile


@kernel
def _fill_kernel(width: int, called: str, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def fill(out: T.Tensor((width,), "float32")) -> None:
        with T.Kernel(1, threads=width):
            lane = T.get_thread_binding()
            out[lane] = T.call_extern("float32", called, 1.0)

    return fill


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test compiles anew, with the compiler that its environment names."""
    compat.load_tilelang()
    from tilelang.contrib import cc

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    cc.get_cplus_compiler.cache_clear()
    yield
    cc.get_cplus_compiler.cache_clear()


def _fault(width: int = 32, called: str = "fabsf") -> FaultError:
    with pytest.raises(FaultError) as raised:
        _fill_kernel.compile(width, called, SM_90A)
    message = str(raised.value)
    assert "__global__" not in message
    assert "\n" not in message
    assert message.startswith("fill for sm_90a was not compiled: ")
    assert message.endswith(f". Run: {raised.value.fix}")
    return raised.value


@pytest.mark.parametrize(
    ("variable", "value", "family", "found", "fix"),
    [
        ("CXX", "/nonexistent/g++", "", "/nonexistent/g++", "unset CXX CC"),
        ("CC", "/nonexistent/g++", "", "/nonexistent/g++", "unset CXX CC"),
        ("PATH", "/nonexistent", "ubuntu debian", "no C++ compiler", "sudo apt-get install --yes g++"),
        ("PATH", "/nonexistent", "fedora", "no C++ compiler", "sudo dnf install --assumeyes gcc-c++"),
        ("TILELANG_CACHE_DIR", __file__, "", __file__, "export TILELANG_CACHE_DIR="),
        ("TILELANG_CACHE_DIR", f"{__file__}/cache", "", __file__, "export TILELANG_CACHE_DIR="),
    ],
)
def test_what_the_environment_lacks(
    variable: str, value: str, family: str, found: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(faults, "os_family", lambda: family)
    fault = _fault()
    assert found in fault.found
    assert fault.fix.startswith(fix)


def test_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cuda_home", lambda: tmp_path)
    with pytest.raises(FaultError, match=f"there is no CUDA compiler in {tmp_path}. Run: tk doctor"):
        raise compat._fault("whatever TileLang says") or AssertionError


def test_a_cache_of_somebody_else() -> None:
    """The folder itself can be written, one below it can't."""
    folder = compat.cache_dir()
    printed = f"RuntimeError: [Errno 13] Permission denied: '{folder}/0.1.15/.staging/x'"
    fault = compat._fault(printed)
    assert fault is not None
    assert fault.found == f"the cache of kernels, {folder}, can't be written: Permission denied"


def test_importing_tilelang_with_a_cache_that_can_not_be_made() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from tk_core import compat; compat.load_tilelang()"],
        env={**os.environ, "TILELANG_CACHE_DIR": f"{__file__}/cache"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "can't be written: Not a directory. Run: export TILELANG_CACHE_DIR=" in ran.stderr.splitlines()[-1]
    assert "KernelCache" not in ran.stderr


def test_kernels_load_from_a_read_only_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written when a kernel is in the cache, which is how a server ships."""
    _fill_kernel.compile(64, "fabsf", SM_90A)
    folder = compat.cache_dir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    script = f"""if True:
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_faults import SM_90A, _fill_kernel, compat
        from tk_core.cli import doctor
        assert not os.access(compat.cache_dir(), os.W_OK)
        loaded = _fill_kernel.compile(64, "fabsf", SM_90A)
        print(loaded.library, compat.num_compilations, doctor._cache_folder().state)
    """
    # Root may write anywhere as long as it has the capability.
    without = ["setpriv", "--bounding-set", "-dac_override", "--"] if os.geteuid() == 0 else []
    command = [*without, sys.executable, "-c", script]
    ran = subprocess.run(command, env={**os.environ, "TK_COMPILE": "forbid"}, capture_output=True, text=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    assert ran.returncode == 0, ran.stderr
    (library,) = folder.rglob("executable.so")
    assert ran.stdout.split() == [str(library), "0", "note"]


def _full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_before_the_binary_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilelang.cache.cuda_binary_cache import CUDABinaryCache

    monkeypatch.setattr(CUDABinaryCache, "save", _full)
    monkeypatch.setattr(
        faults, "cache_fault", lambda folder: faults.unwritable_cache(folder, "No space left on device")
    )
    assert "No space left on device" in _fault(96).found


def test_a_disk_that_is_full_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel is there for this process, and one line says that it was not kept."""
    from tilelang.cache.kernel_cache import KernelCache

    monkeypatch.setattr(KernelCache, "_safe_write_file", _full)
    with caplog.at_level(logging.WARNING, "tk_core"):
        compiled = _fill_kernel.compile(160, "fabsf", SM_90A)
    assert compiled.library is None
    (line,) = (record.getMessage() for record in caplog.records if record.name == "tk_core")
    assert line.startswith("fill for sm_90a was compiled for this process only: the cache of kernels, ")
    assert "Run: export TILELANG_CACHE_DIR=" in line
    assert "Traceback" not in capfd.readouterr().err


def test_source_that_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = _fault(called="no_such_function")
    assert 'identifier "no_such_function" is undefined' in fault.found
    assert fault.fix == "tk doctor"
    assert fault.__suppress_context__
    monkeypatch.setenv("TK_PRINT_KERNEL_SOURCE", "1")
    assert "__global__" in str(_fault(called="no_such_function").__cause__)


def test_errors_of_our_own_pass() -> None:
    @kernel
    def broken(arch: Arch) -> Any:
        raise RuntimeError("a kernel's own mistake")

    with pytest.raises(RuntimeError, match="a kernel's own mistake"):
        broken.compile(SM_90A)
    assert compat._fault("something else entirely") is None


def test_faults_come_back_from_other_processes() -> None:
    fault = pickle.loads(pickle.dumps(FaultError("no g++.", "install it")))
    assert (fault.found, fault.fix, str(fault)) == ("no g++.", "install it", "no g++. Run: install it")


def test_another_folder_is_not_below_the_same_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home, is_below in (("a", False), ("b", True)):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        fix = faults.unwritable_cache(tmp_path / "a" / "cache", "no").fix
        assert (str(tmp_path / home) in fix) == is_below
