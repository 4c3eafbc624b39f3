"""The tables in the packages' READMEs agree with the sources, records and results; their examples run."""

import re
from pathlib import Path

import pytest

from tk_core.testing import tables

_PACKAGES = Path(__file__).parents[1] / "packages"
_WITH_OPS = ["tk-engram", "tk-gemm", "tk-mhc", "tk-moe", "tk-quant"]
_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Examples are for a GPU and the sizes of a model; here they run on a CPU, with small sizes.
_SMALLER = {'"cuda"': '"cpu"', "4096": "256", "7168": "256"}


def _text(package: str) -> str:
    return (_PACKAGES / package / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", _WITH_OPS)
def test_tables_are_up_to_date(package: str) -> None:
    text = _text(package)
    assert "<!-- tk:ops -->" in text
    current = text == tables.updated(_PACKAGES / package / "README.md")
    assert current, f"{package}: out of date, run python -m tk_core.testing.tables"


def test_no_other_package_has_tables() -> None:
    others = {folder.name for folder in _PACKAGES.iterdir()} - set(_WITH_OPS)
    assert others
    assert not [package for package in others if "<!-- tk:" in _text(package)]


@pytest.mark.parametrize("package", [*_WITH_OPS, "tk-modeling"])
def test_examples_run(package: str) -> None:
    examples = _EXAMPLE.findall(_text(package))
    assert examples
    for code in examples:
        for there, here in _SMALLER.items():
            code = code.replace(there, here)
        exec(compile(code, f"{package}/README.md", "exec"), {})
