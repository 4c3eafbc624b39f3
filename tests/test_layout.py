"""An op's source, reference, cases, tests and benchmarks have the same relative path, each in its own folder."""

import importlib
from pathlib import Path

import pytest
import torch

import tk_modeling
import tk_modeling.reference
from tk_core.testing import OpSpec, load_specs, packages

ROOT = Path(__file__).resolve().parents[1]
# Folders of a package that are not families of ops.
SHARED = {"device", "lib", "reference", "testing", "__pycache__"}


def _source(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def _families(package: str) -> set[str]:
    return {folder.name for folder in _source(package).iterdir() if folder.is_dir()} - SHARED


# tk_modeling has functions and modules rather than ops.
IN_FOLDERS = [package for package in packages() if _families(package) and package != "tk_modeling"]
SPECS = [spec for package in IN_FOLDERS for spec in load_specs(package).values()]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_op_has_its_places(spec: OpSpec) -> None:
    """For an op in F/f.py there are reference/F/f.py, testing/F/f.py, tests/F/test_f.py and benchmarks/F/bench_f.py.

    f.py has op f, and perhaps variants that share its kernel, whose names contain f.
    """
    package, family, file = spec.op.__module__.split(".")
    op = spec.name.removeprefix(f"{package}.")
    assert family in _families(package)
    assert file in op
    assert spec.reference is getattr(importlib.import_module(f"{package}.reference"), op)
    assert spec.reference.__module__ == f"{package}.reference.{family}.{file}"
    assert spec in vars(importlib.import_module(f"{package}.testing.{family}.{file}")).values()
    project = ROOT / "packages" / package.replace("_", "-")
    for path in (f"tests/{family}/test_{file}.py", f"benchmarks/{family}/bench_{file}.py"):
        assert (project / path).is_file(), path


@pytest.mark.parametrize("package", IN_FOLDERS)
def test_files_are_called_after_ops(package: str) -> None:
    """Every file of a family is named after a public name; what several ops share is in lib/."""
    files = {file.stem for family in _families(package) for file in (_source(package) / family).glob("*.py")}
    assert files <= set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", IN_FOLDERS)
def test_folders_need_no_init(package: str) -> None:
    """A family is a plain folder; only the package itself, reference and testing have an __init__.py."""
    source = _source(package)
    found = {file.parent.relative_to(source).as_posix() for file in source.rglob("__init__.py")}
    assert found == {".", "reference", "testing"}


@pytest.mark.parametrize("name", tk_modeling.__all__)
def test_trainable_names_have_their_places(name: str) -> None:
    """A module of family F is in F/, with a reference in reference/F.py and a case in testing/F.py."""
    public = getattr(tk_modeling, name)
    if not isinstance(public, type) or not issubclass(public, torch.nn.Module):
        return
    package, family, _ = public.__module__.split(".")
    assert (package, family in _families("tk_modeling")) == ("tk_modeling", True)
    assert getattr(tk_modeling.reference, name).__module__ == f"tk_modeling.reference.{family}"
    cases = importlib.import_module(f"tk_modeling.testing.{family}").CASES
    assert any(type(case.make("cpu")) is public for case in cases)
