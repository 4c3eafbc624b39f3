"""The tables in the packages' READMEs agree with the sources, records and results; their examples run."""

import re
import time
from pathlib import Path

import pytest
import torch

from . import tables

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = _ROOT / "packages"
_WITH_OPS = ["tk-engram", "tk-gemm", "tk-indexer", "tk-mhc", "tk-moe", "tk-quant"]
_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'
_READMES = {"tk": _ROOT / "README.md"} | {path.parent.name: path for path in sorted(_PACKAGES.glob("*/README.md"))}
_EXAMPLES = [
    pytest.param(code, id=f"{name}-{number}")
    for name, path in _READMES.items()
    for number, code in enumerate(_EXAMPLE.findall(path.read_text(encoding="utf-8")))
]


def _text(package: str) -> str:
    return (_PACKAGES / package / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", _WITH_OPS)
def test_tables_are_up_to_date(package: str) -> None:
    text = _text(package)
    assert "<!-- tk:ops -->" in text
    current = text == tables.updated(_PACKAGES / package / "README.md")
    assert current, f"{package}: out of date, run python tests/tables.py"


def test_no_other_package_has_tables() -> None:
    others = {folder.name for folder in _PACKAGES.iterdir()} - set(_WITH_OPS)
    assert others
    assert not [package for package in others if "<!-- tk:" in _text(package)]


def test_all_but_tk_core_have_examples() -> None:
    without = [name for name, path in _READMES.items() if "```python" not in path.read_text(encoding="utf-8")]
    assert without == ["tk-core"]


@pytest.mark.parametrize("code", _EXAMPLES)
def test_examples_run_without_a_gpu(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are written, within ten seconds of one core."""
    assert code.count("cuda") == 2 * code.count(_DEVICE) > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.process_time()
    try:
        exec(compile(code, "README.md", "exec"), {})
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - start < 10
