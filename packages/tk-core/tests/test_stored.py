"""Kernels are loaded from the disk cache without TileLang, which compiles them anew where anything has changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tk_core import stored

_BUILDER = """\
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.bits import count_leading_zeros
from tk_core.kernel import kernel
from tk_stored_helper.factor import FACTOR


@kernel
def scale_kernel(size: int, dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def scale(x: T.Tensor((size,), dtype)) -> None:
        with T.Kernel(1, threads=32):
            for i in T.Parallel(size):
                x[i] = x[i] * T.cast(FACTOR, dtype) + T.cast(count_leading_zeros(i), dtype)

    return scale
"""
_LOAD = """\
import sys
import torch
from tk_core import compat
from tk_core.arch import arch_from_name
from tk_stored_test.scale import scale_kernel
for size in map(int, sys.argv[1:]):
    compiled = scale_kernel.compile(size, torch.float32, arch_from_name("sm_90a"))
    assert callable(compiled.function)
    try:
        compiled.function(torch.zeros(size))
    except Exception as error:
        assert "cuda" in str(error).lower(), error
    else:
        raise AssertionError("took a tensor of the CPU")
    print("tilelang" in sys.modules, compat.num_compilations, compiled.library and compiled.library.parent.name)
"""

Load = Callable[..., list[list[str]]]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A package with a kernel, and one that it imports."""
    for name, module, text in (
        ("tk_stored_test", "scale.py", _BUILDER),
        ("tk_stored_helper", "factor.py", "FACTOR = 0.5\n"),
    ):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / module).write_text(text)
    return tmp_path / "packages"


@pytest.fixture
def load(packages: Path, tmp_path: Path) -> Load:
    """Load kernels of these sizes in a new process: was TileLang imported, how many were compiled, which is it?"""

    def run(*sizes: int, first: str = "", **variables: str) -> list[list[str]]:
        paths = [str(packages), *(path for path in sys.path if path)]
        command = (sys.executable, "-B", "-c", first + _LOAD, *map(str, sizes))
        variables = {"PYTHONPATH": ":".join(paths), "TILELANG_CACHE_DIR": str(tmp_path / "cache"), **variables}
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()[-len(sizes) :]]

    return run


@pytest.mark.compile
def test_a_compiled_kernel_is_loaded_without_tilelang(load: Load, packages: Path, tmp_path: Path) -> None:
    [compiled] = load(32)
    assert compiled[:2] == ["True", "1"]
    # Another size is another kernel, for which TileLang is imported after its libraries.
    stored_already, other = load(32, 16)
    assert stored_already == ["False", "0", *compiled[2:]]
    assert other[:2] == ["True", "1"]
    (packages / "tk_stored_helper" / "factor.py").write_text("FACTOR = 0.25\n")
    assert load(32)[0][:2] == ["True", "1"]
    # Without notes, or with damaged ones, TileLang finds it; a damaged library is compiled anew.
    for note in (tmp_path / "cache" / "tk").iterdir():
        note.write_text("nonsense")
    (packages / "tk_stored_helper" / "factor.py").write_text("FACTOR = 0.5\n")
    assert load(32, TK_COMPILE="forbid") == [["True", "0", *compiled[2:]]]
    [library] = tmp_path.glob(f"cache/*/*/kernels/{compiled[2]}/executable.so")
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    assert load(32) == [["True", "1", *compiled[2:]]]
    assert load(32, TILELANG_DISABLE_CACHE="1") == [["True", "1", "None"]]


_EARLIER = """\
from tk_core import compat
compat.tilelang_version = lambda: "0.1.12"
"""


@pytest.mark.compile
def test_an_earlier_tilelang_loads_what_ours_compiled_and_compiles_nothing(load: Load, packages: Path) -> None:
    [compiled] = load(32)
    # TileLang is not imported, and its settings don't matter.
    for variables in ({}, {"TK_COMPILE": "forbid"}, {"TILELANG_DISABLE_CACHE": "1"}):
        assert load(32, first=_EARLIER, **variables) == [["False", "0", *compiled[2:]]]
    with pytest.raises(
        AssertionError, match=r"FaultError: .*\(16, .* 0\.1\.12 only loads kernels\. Run: tk cache import"
    ):
        load(16, first=_EARLIER)
    with pytest.raises(AssertionError, match=r"CompilationForbiddenError: .*TK_COMPILE=forbid"):
        load(16, first=_EARLIER, TK_COMPILE="forbid")


def test_builders_that_may_depend_on_more_have_no_note() -> None:
    def local() -> None:
        """Defined where it may see anything."""

    for builder in (local, _module_level, torch.nn.functional.relu):
        assert stored.note_path(builder, (), {}, ()) is None


def _module_level() -> None:
    """In a module that is in no package; torch's are in one that imports more than is hashed."""


_SCRIPT = (
    _BUILDER.replace("from tk_stored_helper.factor import FACTOR", "FACTOR = 0.5")
    + """
from tk_core.arch import arch_from_name
from tk_core.kernel import capture

arch = arch_from_name("sm_90a")
with capture(arch) as requests:
    scale_kernel(32, torch.float32, arch)()
assert callable(requests[0].compile().function)
print("done")
"""
)


_ELSEWHERE = """
import linecache, runpy

text = open("script.py").read()
runpy.run_path("script.py")
exec(compile(text, "script.py", "exec"), {})
linecache.cache["<cell 1>"] = len(text), None, text.splitlines(True), ""  # as a notebook does
exec(compile(text, "<cell 1>", "exec"), {"__name__": "__main__"})
exec(text, {})  # no text that TileLang could read
"""


@pytest.mark.compile
def test_a_kernel_of_ones_own_needs_no_package(tmp_path: Path) -> None:
    """It may be in a script, a notebook, or other code whose text Python has."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    variables = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-B", *arguments]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)

    script, elsewhere = run("script.py"), run("-c", _ELSEWHERE)
    assert (script.returncode, script.stdout) == (0, "done\n"), script.stderr
    assert elsewhere.stdout.count("done") == 3, elsewhere.stderr
    assert "scale_kernel: TileLang needs the builder's source text" in elsewhere.stderr.splitlines()[-1]
