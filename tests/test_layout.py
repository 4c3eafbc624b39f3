"""Where a reader finds an op's reference and cases."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import tk_modeling
import tk_modeling.reference
from tk_core.testing import OpSpec, load_specs

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(folder for folder in ROOT.glob("packages/*/src/*") if folder.is_dir())


@pytest.mark.parametrize("spec", load_specs().values(), ids=lambda spec: spec.name)
def test_op_has_its_places(spec: OpSpec) -> None:
    """Op f has its reference at the same path below reference/, or in a file there that has the name of its file or
    folder; and its spec in test_f.py, perhaps with others.

    The spec of a variant, such as f_with_sf, may be in test_f.py too.
    """
    package, _, op = spec.name.partition(".")
    module = spec.op.__module__.removeprefix(f"{package}.")
    assert module.partition(".")[0] not in ("lib", "device"), "expected a public function outside of what ops share"
    assert spec.reference is getattr(importlib.import_module(f"{package}.reference"), op)
    places = {f"{package}.reference.{part}" for part in (module, *module.split("."))}
    assert spec.reference.__module__ in places | {spec.op.__module__}
    tests = f"packages.{package.replace('_', '-')}.tests."
    files = [name for name, file in sys.modules.items() if name.startswith(tests) and spec in vars(file).values()]
    assert any(file.rpartition(".test_")[2] in op for file in files), files


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_folders_are_packages(source: Path) -> None:
    """Every folder with code has an __init__.py: documentation tools find nothing below one without."""
    folders = {folder for file in source.rglob("*.py") for folder in file.parents if folder.is_relative_to(source)}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", tk_modeling.__all__)
def test_trainable_names_have_their_places(name: str) -> None:
    """A module of family F is in F/, with a reference in reference/F.py and a case in tests/F/cases.py."""
    public = getattr(tk_modeling, name)
    if not isinstance(public, type) or not issubclass(public, torch.nn.Module):
        return
    package, family, _ = public.__module__.split(".")
    assert package == "tk_modeling"
    assert getattr(tk_modeling.reference, name).__module__ == f"tk_modeling.reference.{family}"
    cases = importlib.import_module(f"packages.tk-modeling.tests.{family}.cases").CASES
    assert any(type(case.make("cpu")) is public for case in cases)
