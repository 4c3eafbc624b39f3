"""ElasticBuffer on one, two and four GPUs, each with a process: the symmetric backend, and the collective one on NCCL.

Tests run one at a time, as some measure how long ranks wait.
"""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from . import cases
from .copying import COPYING, copies_with_rank_1_killed, fetches, gathers, graphs_of_copies
from .ranks import Case, run

ON_ONE = (
    cases.random_routings,
    cases.a_user_of_deep_ep,
    cases.equal_bits_in_all_runs,
    cases.streams_and_events,
    cases.graphs,
    cases.in_split_calls,
)
ON_SEVERAL = (
    *ON_ONE,
    cases.split_on_some_ranks,
    cases.rank_1_is_waited_for,
    cases.bad_arguments_of_one_rank,
    cases.faults_of_the_constructor,
    cases.differences_in_debug_mode,
    cases.other_methods,
)
ON_NCCL = (
    cases.random_routings,
    cases.extreme_routings,
    cases.a_user_of_deep_ep,
    cases.differences_in_debug_mode,
    cases.other_methods,
    cases.nothing_is_captured,
    *COPYING,
)
SEVERAL = [pytest.param(count, marks=pytest.mark.gpus(count)) for count in (2, 4)]


def run_on_gpus(
    tests: tuple[Case, ...], num_gpus: int, folder: Path, backend: str, ended: tuple[int, ...] = ()
) -> None:
    """Run cases on GPUs 0, 1 …"""
    with Path(tempfile.gettempdir(), f"tk-ep-gpus-{os.getuid()}").open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        run(tests, num_gpus, folder, limit=580, ended=ended, device="cuda", backend=backend)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("num_gpus", [1, *SEVERAL])
def test_symmetric(num_gpus: int, tmp_path: Path) -> None:
    tests = ON_ONE if num_gpus == 1 else ON_SEVERAL
    tests += (cases.ranks_1_and_3,) if num_gpus == 4 else ()
    run_on_gpus(tests, num_gpus, tmp_path, "symmetric")


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [1, *SEVERAL])
def test_symmetric_copies(num_gpus: int, tmp_path: Path) -> None:
    tests = (gathers, fetches) if num_gpus == 1 else COPYING
    run_on_gpus((*tests, graphs_of_copies), num_gpus, tmp_path, "symmetric")


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("num_gpus", SEVERAL)
def test_nccl(num_gpus: int, tmp_path: Path) -> None:
    run_on_gpus(ON_NCCL, num_gpus, tmp_path, "collective")


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("num_gpus", SEVERAL)
@pytest.mark.parametrize("case", [cases.rank_1_is_killed, cases.rank_1_raises, copies_with_rank_1_killed])
@pytest.mark.parametrize("backend", ["symmetric", "collective"])
def test_a_lost_rank(case: Case, backend: str, num_gpus: int, tmp_path: Path) -> None:
    run_on_gpus((case,), num_gpus, tmp_path, backend, ended=(1,))


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("num_gpus", SEVERAL)
def test_a_lost_rank_in_split_calls(num_gpus: int, tmp_path: Path) -> None:
    run_on_gpus((cases.rank_1_is_killed_in_split_calls,), num_gpus, tmp_path, "symmetric", ended=(1,))
