"""10⁴ random routings on GPUs: `pytest packages/tk-ep/tests/soak.py`, which runs only if it is named."""

from functools import partial
from pathlib import Path

import pytest

from . import cases
from .test_gpus import SEVERAL, run_on_gpus


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("num_gpus", [1, *SEVERAL])
def test_soak(num_gpus: int, tmp_path: Path) -> None:
    run_on_gpus((partial(cases.random_routings, count=10_000),), num_gpus, tmp_path, "symmetric")
