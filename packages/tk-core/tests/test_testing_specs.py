"""tk_core.testing.specs and tk_core.testing.trees."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tk_core.testing import Case, OpSpec, assert_equal, load_specs
from tk_core.testing.trees import distinct_bytes, map_tensors, storage_bytes, tensors, transfer, unaligned

Pair = namedtuple("Pair", ["data", "sf"])


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


identity.__module__ = "tk_zz.identity"


def make(device: str) -> dict[str, Any]:
    return {"x": torch.ones(4, device=device)}


def test_names() -> None:
    assert OpSpec(identity, identity, ()).name == "tk_zz.identity"
    for bad in ("BF16", "a b", "-a", "a--b", "a_b", ""):
        with pytest.raises(ValueError, match="name: expected kebab-case"):
            Case(bad, make)
    assert Case("bf16-h7168-t0.5", make).gpu
    with pytest.raises(ValueError, match=r"expected unique names, got a more than once in tk_zz\.identity"):
        OpSpec(identity, identity, (Case("a", make), Case("a", make)))


def test_bytes() -> None:
    x, out = torch.zeros(4, 8), torch.zeros(4, dtype=torch.bfloat16)
    spec = OpSpec(identity, identity, ())
    assert spec.bytes_of({"x": x[:, :2], "n": 3}, (out, None)) == 4 * 2 * 4 + 8
    assert spec.bytes_of({"x": x, "out": out}, out) == 128 + 8
    assert OpSpec(identity, identity, (), least_bytes=lambda kwargs, outputs: 7).bytes_of({"x": x}, out) == 7
    assert distinct_bytes([]) == 0


def write_package(folder: Path, second: str = "") -> None:
    """A package in packages/tk-zz with ops f and g; `second` is in a test file that uses another's spec."""
    source, tests = folder / "src" / "tk_zz", folder / "tests"
    (tests / "family" / "deeper").mkdir(parents=True)
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "f.py").write_text("def f(x):\n    return x\n\ndef g(x):\n    return x\n")
    body = "from tk_core.testing import OpSpec\nfrom tk_zz.f import f, g\n"
    (tests / "test_without_a_spec.py").write_text("raise RuntimeError\n")
    (tests / "family" / "deeper" / "test_f.py").write_text(
        f"{body}IMPORTS = []\nSPEC = OpSpec(f, f, ())\nG_SPEC = OpSpec(g, g, ())\n"
    )
    (tests / "family" / "test_h.py").write_text(
        f"{body}from .deeper.test_f import IMPORTS, SPEC\n{second}\nIMPORTS.append('OpSpec(')\n"
    )


@pytest.fixture
def zz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages" / "tk-zz"
    monkeypatch.syspath_prepend(folder / "src")
    # Those of other tests are named so, too.
    for name in [name for name in sys.modules if name.startswith(("tk_zz", "packages.tk-zz"))]:
        monkeypatch.delitem(sys.modules, name)
    yield folder
    for name in [name for name in sys.modules if name.startswith(("tk_zz", "packages.tk-zz"))]:
        del sys.modules[name]


def test_specs_are_found(zz: Path) -> None:
    write_package(zz)
    assert list(load_specs("tk_zz")) == list(load_specs("tk_zz")) == ["tk_zz.f", "tk_zz.g"]
    once = sys.modules["packages.tk-zz.tests.family.deeper.test_f"]
    assert len(once.IMPORTS) == 1, "expected one import of each file, by the name that pytest gives it"


def test_one_spec_an_op(zz: Path) -> None:
    write_package(zz, "AGAIN = OpSpec(g, g, ())")
    with pytest.raises(ValueError, match=r"test_h.py: expected one OpSpec for tk_zz.g"):
        load_specs("tk_zz")


def test_packages_without_specs(zz: Path) -> None:
    write_package(zz)
    shutil.rmtree(zz / "tests")
    with pytest.raises(FileNotFoundError, match="tk_zz: its cases are in the repository"):
        load_specs("tk_zz")
    (zz / "tests").mkdir()
    assert load_specs("tk_zz") == {}
    with pytest.raises(ModuleNotFoundError):
        load_specs("tk_not_there")


def test_importing_testing_loads_neither_tilelang_nor_pytest() -> None:
    code = "import sys, tk_core.testing; print([n for n in ('tilelang', 'pytest', '_pytest') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_trees() -> None:
    x = torch.arange(4.0)
    tree = {"a": (x, None), "b": [Pair(x + 1, 3)]}
    assert len(tensors(tree)) == 2
    mapped = map_tensors(lambda t: t * 2, tree)
    assert_equal(mapped, {"a": (x * 2, None), "b": [Pair((x + 1) * 2, 3)]})
    assert isinstance(mapped["b"][0], Pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.bool], ids=str)
def test_transfer_keeps_strides_gaps_and_sharing(dtype: torch.dtype) -> None:
    wide = torch.randint(0, 2, (4, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    copies = transfer((wide[1:, 2:5], wide, wide[:0], 3))
    assert_equal(copies, (wide[1:, 2:5], wide, wide[:0], 3))
    assert torch.equal(storage_bytes(copies[0]), storage_bytes(wide))
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr() != wide.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_unaligned_keeps_values_and_strides(dtype: torch.dtype) -> None:
    x = torch.arange(32).to(dtype).view(4, 8)[1:, 2:5]
    moved = unaligned(x)
    assert_equal(moved, x)
    assert moved.data_ptr() % 16 == (x.storage_offset() + 1) * dtype.itemsize % 16
