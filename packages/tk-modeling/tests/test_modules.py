"""Every module against its reference, in all the ways that a module is used."""

from collections.abc import Callable

import pytest

from tk_modeling.testing import engram, fp8, mhc, moe
from tk_modeling.testing.checks import checks

# GroupedFP8Linear takes rows in segments, and no leading dimensions: tests/fp8 has its tests.
CASES = (*mhc.CASES, *engram.CASES, *moe.CASES, fp8.LINEAR)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=name, marks=[pytest.mark.gpu] if needs_gpu else [])
        for case in CASES
        for name, check, needs_gpu in checks(case)
    ],
)
def test_module(check: Callable[[], None]) -> None:
    check()
