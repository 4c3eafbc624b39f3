"""CUDA headers: kernels get the text of those that they call, and are compiled anew when that changes."""

from pathlib import Path
from typing import Any

import pytest

from tk_core import headers
from tk_core.arch import Arch, arch_from_name
from tk_core.headers import Header, builtin
from tk_core.kernel import Kernel, kernel

SM_90A = arch_from_name("sm_90a")

_TWICE = """\
#pragma once
#include "half.cuh"
#include <cuda_fp16.h>

#define tk_twice(x) ((x) / tk_half())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "twice.cuh").write_text(_TWICE)
    (tmp_path / "half.cuh").write_text("#pragma once\n#define tk_half() 0.5f\n")
    return tmp_path


def _kernel(folder: Path) -> Kernel:
    twice, half = Header(str(folder / "twice.py")), Header(str(folder / "half.py"))

    @kernel
    def twice_kernel(size: int, arch: Arch) -> Any:
        import tilelang.language as T

        @T.macro
        def change(x: T.Buffer, i: T.int32) -> None:
            x[i] = twice.call("float32", "tk_twice", x[i]) + half.call("float32", "tk_half")

        @T.prim_func
        def twice_(x: T.Tensor((size,), "float32")) -> None:
            with T.Kernel(1, threads=32):
                T.import_source("// What the kernel brings itself.\n")
                lane = T.get_thread_binding()
                if builtin("int32", "__clz", lane) > 28:
                    change(x, lane)

        return twice_

    return twice_kernel


def test_an_edit_of_an_included_header_compiles_the_kernel_anew(folder: Path) -> None:
    kernel = _kernel(folder)
    before, same = kernel.compile(32, SM_90A), kernel.compile(32, SM_90A)
    assert before.library is not None
    assert before.library == same.library
    (folder / "half.cuh").write_text("#define tk_half() (0.25f * 2.0f)\n")
    after = kernel.compile(32, SM_90A)
    assert after.library not in (None, before.library)
    assert "0.25f" not in before.source()
    assert "0.25f" in after.source()


def test_a_prelude_has_each_header_once_behind_what_it_includes(folder: Path) -> None:
    program = str(_kernel(folder).build(32, SM_90A).script(show_meta=True))
    texts = ("define tk_half()", "define tk_twice(", "What the kernel brings")
    assert [program.count(text) for text in texts] == [1, 1, 1]
    assert sorted(texts, key=program.index) == list(texts)
    assert "#pragma once" not in program
    assert "half.cuh" not in program
    assert "#include <cuda_fp16.h>" in program


def test_a_header_may_include_one_of_tk_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = folder / "shared"
    shared.mkdir()
    (folder / "half.cuh").rename(shared / "half.cuh")
    monkeypatch.setattr(headers, "_SHARED", shared)
    assert headers.with_includes([folder / "twice.cuh"]) == [shared / "half.cuh", folder / "twice.cuh"]
    assert headers.prelude([folder / "twice.cuh"]).startswith("#define tk_half()")


def test_a_call_outside_of_a_builder_is_an_error(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="tk_twice: expected to be called in a builder under @kernel"):
        Header(str(folder / "twice.py")).call("float32", "tk_twice", 1.0)
