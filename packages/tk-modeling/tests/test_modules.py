"""Every module against its reference, in all the ways that a module is used."""

from collections.abc import Callable

import pytest

from .checks import checks
from .engram import cases as engram
from .fp8 import cases as fp8
from .mhc import cases as mhc
from .moe import cases as moe
from .norm import cases as norm

CASES = (*mhc.CASES, *engram.CASES, *moe.CASES, *fp8.CASES, *norm.CASES)


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
