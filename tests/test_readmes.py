"""The tables in the packages' READMEs say what the sources, records and results say; their examples run."""

import re
from pathlib import Path

import pytest

from tk_core.testing import tables

_READMES = sorted(Path(__file__).parents[1].glob("packages/*/README.md"))


@pytest.mark.parametrize("readme", _READMES, ids=lambda readme: readme.parent.name)
def test_tables_are_up_to_date(readme: Path) -> None:
    current = readme.read_text(encoding="utf-8") == tables.updated(readme)
    assert current, f"{readme}: out of date, run python -m tk_core.testing.tables"


@pytest.mark.parametrize("readme", _READMES, ids=lambda readme: readme.parent.name)
def test_examples_run(readme: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        exec(code.replace('"cuda"', '"cpu"').replace("4096", "256").replace("7168", "256"), {})
