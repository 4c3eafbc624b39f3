"""Where packages whose ops live in folders keep what belongs to an op: always at the same place under another root."""

import importlib
from pathlib import Path

import pytest
import torch

import tk_modeling
import tk_modeling.reference
from tk_core.testing import packages

ROOT = Path(__file__).resolve().parents[1]
# Folders of a package that are no families of ops.
SHARED = {"device", "lib", "reference", "testing", "__pycache__"}


def _source(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def _families(package: str) -> set[str]:
    return {folder.name for folder in _source(package).iterdir() if folder.is_dir()} - SHARED


# tk_modeling has functions and modules rather than ops.
IN_FOLDERS = [package for package in packages() if _families(package) and package != "tk_modeling"]
OPS = [(package, name) for package in IN_FOLDERS for name in importlib.import_module(package).__all__]


@pytest.mark.parametrize(("package", "name"), OPS, ids=lambda value: value)
def test_op_has_its_places(package: str, name: str) -> None:
    """Of op f in folder F: reference.F.f, testing.F.f with SPEC, tests/F/test_f.py, benchmarks/F/bench_f.py."""
    op = getattr(importlib.import_module(package), name)
    family = op.__module__.split(".")[1]
    assert op.__module__ == f"{package}.{family}.{name}"
    assert family in _families(package)
    reference = getattr(importlib.import_module(f"{package}.reference"), name)
    assert reference.__module__ == f"{package}.reference.{family}.{name}"
    spec = importlib.import_module(f"{package}.testing.{family}.{name}").SPEC
    assert spec.name == f"{package}.{name}"
    assert spec.op is op
    assert spec.reference is reference
    project = ROOT / "packages" / package.replace("_", "-")
    for file in (f"tests/{family}/test_{name}.py", f"benchmarks/{family}/bench_{name}.py"):
        assert (project / file).is_file(), file


@pytest.mark.parametrize("package", IN_FOLDERS)
def test_references_have_the_ops_names(package: str) -> None:
    reference = importlib.import_module(f"{package}.reference")
    assert sorted(reference.__all__) == sorted(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", IN_FOLDERS)
def test_folders_need_no_init(package: str) -> None:
    """A family is a plain folder; only the package itself, reference and testing have names of their own."""
    source = _source(package)
    found = {file.parent.relative_to(source).as_posix() for file in source.rglob("__init__.py")}
    assert found == {".", "reference", "testing"}


@pytest.mark.parametrize("name", tk_modeling.__all__)
def test_trainable_names_have_their_places(name: str) -> None:
    """A module of family F lies in F/, with a reference in reference/F.py and a case in testing/F.py."""
    public = getattr(tk_modeling, name)
    if not isinstance(public, type) or not issubclass(public, torch.nn.Module):
        return
    package, family, _ = public.__module__.split(".")
    assert (package, family in _families("tk_modeling")) == ("tk_modeling", True)
    assert getattr(tk_modeling.reference, name).__module__ == f"tk_modeling.reference.{family}"
    cases = importlib.import_module(f"tk_modeling.testing.{family}").CASES
    assert any(type(case.make("cpu")) is public for case in cases)
