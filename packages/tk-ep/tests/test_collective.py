"""The collective backend, in processes of a gloo group, equals the reference bit for bit."""

import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from . import cases
from .cases import SHORT, make_buffer
from .copying import COPYING, copies_with_rank_1_killed
from .ranks import Case, Here, run

CASES = (
    cases.random_routings,
    cases.ranks_1_and_3,
    cases.extreme_routings,
    cases.sums_in_order,
    cases.a_user_of_deep_ep,
    cases.bad_arguments_of_one_rank,
    cases.faults_of_the_constructor,
    cases.differences_in_debug_mode,
    cases.other_methods,
    *COPYING,
)


def test_four_ranks(tmp_path: Path) -> None:
    run(CASES, 4, tmp_path, limit=200)


def a_benchmark(here: Here) -> None:
    """benchmarks/measure.py times every call, and knows how many bytes each moves."""
    measure = import_module("packages.tk-ep.benchmarks.measure")
    bench, moved = measure.Bench(here.device, None), {}
    topk_idx = torch.tensor([[0, 1], [0, 3], [2, 3]])  # Experts 0 and 1 are on rank 0.
    for reduces in (True, False):
        buffer = make_buffer(here, num_bytes=4 << 20, allow_multiple_reduction=reduces)
        for case in measure.cases_of(bench, buffer, topk_idx, 128, 4, 24):
            assert bench.time(lambda case=case: case.run(False)) > 0
            moved[case.name] = case.remote_bytes, case.local_bytes
        buffer.destroy()
    # Two tokens of each rank go to each: 4 are received, for 6 rows. A row of FP8 has 132 bytes, one of bfloat16 256.
    assert moved["dispatch FP8"] == (2 * 132, (4 + 4) * 132)
    assert moved["dispatch FP8 expanded, zeroed"][1] == (4 + 2 * 128) * 132
    assert moved["dispatch bf16 expanded, handle"] == (2 * 256, (4 + 6) * 256)
    assert moved["combine expanded"] == (2 * 256, (4 + 3) * 256)
    assert moved["combine expanded, all rows"] == (3 * 256, (6 + 3) * 256)
    assert len(moved) == 9
    for case in measure.copies_of(bench, "collective", 4096):
        assert bench.time(lambda case=case: case.run(False)) > 0
        assert case.remote_bytes == 4096


def test_two_ranks(tmp_path: Path) -> None:
    tests = [case for case in CASES if case not in (cases.random_routings, cases.ranks_1_and_3, cases.sums_in_order)]
    run((*tests, a_benchmark), 2, tmp_path, limit=100)


def rank_1_is_late(here: Here) -> None:
    cases.lose_rank_1(here, lambda: time.sleep(3 * SHORT))


@pytest.mark.parametrize(
    "case", [cases.rank_1_is_killed, copies_with_rank_1_killed, cases.rank_1_raises, rank_1_is_late]
)
def test_a_lost_rank(case: Case, tmp_path: Path) -> None:
    run([case], 3, tmp_path, limit=60, ended=[1] if case is not rank_1_is_late else [])
