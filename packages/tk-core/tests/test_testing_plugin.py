"""tk_core.testing.plugin: which tests run where, seeds, GPUs of workers, records."""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_core import ledger
from tk_core.arch import arch_from_name
from tk_core.testing import launches, machine, memory, plugin, specs, tiers

pytest_plugins = ["pytester"]

_TESTS = """
import pytest

def test_cpu():
    pass

@pytest.mark.compile
def test_compile():
    pass

@pytest.mark.gpu
def test_gpu():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*args: str, gpu: bool) -> pytest.RunResult:
        monkeypatch.setattr(plugin, "_has_gpu", lambda: gpu)
        monkeypatch.setattr(memory, "gpu_memory", lambda gib, num_workers: nullcontext())
        return pytester.runpytest_inprocess("-p", "tk_core.testing.plugin", "-p", "no:cacheprovider", *args)

    return run


def test_gpu_tests_are_left_out_without_a_gpu(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(_TESTS)
    result = run(gpu=False)
    result.assert_outcomes(passed=2, deselected=1)
    result.stdout.fnmatch_lines(["1 gpu tests left out: no GPU here"])


def test_everything_runs_with_a_gpu(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(_TESTS)
    result = run(gpu=True)
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line("*left out*")


def test_a_gpu_test_takes_the_memory_that_it_declares(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_cpu():
            pass

        @pytest.mark.gpu
        def test_small():
            pass

        @pytest.mark.gpu(gib=3)
        def test_large():
            pass

        @pytest.mark.gpu(gib=lambda params: 2 * params["size"])
        @pytest.mark.parametrize("size", [4, 5])
        def test_computed(size):
            pass
        """
    )
    taken: list[tuple[float, int]] = []

    def gpu_memory(gib: float, num_workers: int) -> AbstractContextManager[None]:
        taken.append((gib, num_workers))
        return nullcontext()

    monkeypatch.setattr(plugin, "_has_gpu", lambda: True)
    monkeypatch.setattr(memory, "gpu_memory", gpu_memory)
    pytester.runpytest_inprocess("-p", "tk_core.testing.plugin", "-p", "no:cacheprovider").assert_outcomes(passed=5)
    assert taken == [(1, 1), (3, 1), (8, 1), (10, 1)]


@pytest.mark.parametrize("markexpr", ["gpu", "gpu and not compile", "bench", "(gpu) and other"])
def test_asking_for_a_gpu_without_one_is_an_error(pytester: pytest.Pytester, run: Any, markexpr: str) -> None:
    pytester.makepyfile(_TESTS)
    result = run("-m", markexpr, gpu=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*needs a GPU and there is none here"])


@pytest.mark.parametrize(("markexpr", "passed"), [("not gpu", 2), ("gpu or compile", 1), ("not compile", 1)])
def test_other_expressions_run_without_a_gpu(pytester: pytest.Pytester, run: Any, markexpr: str, passed: int) -> None:
    pytester.makepyfile(_TESTS)
    result = run("-m", markexpr, gpu=False)
    assert result.ret == 0
    result.assert_outcomes(passed=passed, deselected=3 - passed)


def test_a_gpu_test_that_skips_fails(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_inside():
            pytest.skip("no time")

        @pytest.mark.gpu
        @pytest.mark.skipif(True, reason="not today")
        def test_mark():
            pass

        def test_cpu():
            pytest.skip("fine")

        @pytest.mark.gpu
        @pytest.mark.xfail(strict=True)
        def test_expected():
            assert False
        """
    )
    result = run(gpu=True)
    result.assert_outcomes(failed=1, errors=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*no time*", "a gpu test that skips where it could run counts as failed"])


def test_tests_for_another_architecture_are_left_out(
    pytester: pytest.Pytester, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tk_core.arch.get_arch", lambda device=None: arch_from_name("sm_90a"))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(arch="sm_90a")
        def test_here():
            pass

        @pytest.mark.gpu(arch="sm_100a")
        def test_elsewhere():
            assert False
        """
    )
    result = run(gpu=True)
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["1 gpu tests left out: for another architecture, or more GPUs"])


def test_tests_for_more_gpus_are_left_out(pytester: pytest.Pytester, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_num_gpus", lambda: 2)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.gpus(2)
        def test_two():
            pass

        @pytest.mark.gpu
        @pytest.mark.gpus(4)
        def test_four():
            assert False
        """
    )
    run("-m", "gpu", gpu=True).assert_outcomes(passed=1, deselected=1)
    run(gpu=False).assert_outcomes(deselected=2)


_BENCH = """
import pytest

@pytest.mark.bench
def test_bench(request):
    request.node.user_properties.append(("tk_bench", {
        "op": "tk_zz.f", "case": "big", "us": 2.0, "gbps": 1500.0, "of_copy": 0.5, "eager_us": 8.0,
        "compiled_error": "no", "host_us": 7.0, "host_bare_us": None,
    }))
"""


def test_benchmarks_run_only_when_asked_for(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(bench_f=_BENCH, test_f=_TESTS)
    run(gpu=True).assert_outcomes(passed=3)
    run("bench_f.py", gpu=True).assert_outcomes(passed=1)
    run("bench_f.py", gpu=False).assert_outcomes(deselected=1)
    result = run("-m", "bench", "--tk-results", "results/new.jsonl", gpu=True)
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(["*= benchmarks =*", "tk_zz.f*big*2.0*1500*50%*8.0*error*7.0*–*"])
    (row,) = (pytester.path / "results/new.jsonl").read_text().splitlines()
    assert json.loads(row)["case"] == "big"


def test_seeds_depend_on_the_test_alone(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(
        """
        import random
        import numpy as np
        import pytest
        import torch

        seen = {}

        @pytest.mark.parametrize("n", [1, 2])
        def test_draw(n):
            seen[n] = random.random(), np.random.rand(), torch.rand(()).item()
            print("drew", n, seen[n])

        def test_different():
            assert all(a != b for a, b in zip(seen[1], seen[2]))
        """
    )
    first, second = (run("-s", gpu=False) for _ in range(2))
    first.assert_outcomes(passed=3)
    drew = [[line for line in result.outlines if "drew" in line] for result in (first, second)]
    assert len(drew[0]) == 2
    assert drew[0] == drew[1]


def test_each_worker_begins_with_a_gpu_of_its_own(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.parametrize("n", range(4))
        def test_gpu_of(n, worker_id):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == {"gw0": "4,7", "gw1": "7,4"}[worker_id]

        @pytest.mark.gpu
        def test_gpu():
            assert False
        """
    )
    result = pytester.runpytest_subprocess("-p", "tk_core.testing.plugin", "-n2")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["1 gpu tests left out: no GPU here"])


def test_bytecode_is_kept_apart_where_none_may_lie_beside_the_sources(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    test = pytester.makepyfile("def test(): pass")
    pytester.runpytest_inprocess("-p", "tk_core.testing.plugin").assert_outcomes(passed=1)
    kept = pytester.path / ".pytest_cache" / "d" / "bytecode"
    assert (os.environ["PYTHONDONTWRITEBYTECODE"], os.environ["PYTHONPYCACHEPREFIX"]) == ("", str(kept))
    found = [file.parent for file in pytester.path.rglob("*.pyc")]
    assert kept / test.parent.relative_to("/") in found
    assert all(folder.is_relative_to(kept) for folder in found)


@pytest.mark.parametrize(
    ("args", "gpu_gib", "workers"),
    [
        (["-m", "bench"], 80, 0),
        (["bench_f.py"], 80, 0),
        (["bench_f.py::test_f"], 80, 0),
        (["test_f.py"], 80, 12),
        (["test_f.py"], 24, 8),
    ],
)
def test_one_worker_for_each_core_that_the_gpu_has_memory_for_and_none_beside_a_benchmark(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, args: list[str], gpu_gib: int, workers: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = SimpleNamespace(total_memory=gpu_gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    config = pytester.parseconfig("-p", "tk_core.testing.plugin", *args)
    assert plugin.pytest_xdist_auto_num_workers(config) == workers


# ---- records

_OP_TESTS = """
import pytest

def of(test):
    return pytest.mark.tk_case(op="tk_zz.f", test=test)

@pytest.mark.gpu
@pytest.mark.parametrize("test", [
    pytest.param("gpu-one", id="one", marks=of("gpu-one")),
    pytest.param("gpu-two", id="two", marks=of("gpu-two")),
    pytest.param("modes-other-device-one", id="more", marks=of("modes-other-device-one")),
])
def test_f(test):
    assert test != BAD
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    written: dict[str, Any] = {}
    found = dict.fromkeys(("gpu", "driver", "torch", "cuda", "tilelang", "date", "python"), "x")
    monkeypatch.setattr(machine, "versions", lambda: found)
    monkeypatch.setattr(specs, "load_specs", lambda: {"tk_zz.f": None, "tk_zz.other": None})
    monkeypatch.setattr(tiers, "gpu_test_names", lambda spec: {"gpu-one", "gpu-two"})
    monkeypatch.setattr("tk_core.arch.get_arch", lambda device=None: arch_from_name("sm_90a"))
    monkeypatch.setattr(launches, "hashes_of", lambda op, arch: {"one": arch})
    monkeypatch.setattr(ledger, "record", lambda op, *entry: written.update({op: entry}))
    return written


def test_a_full_run_is_recorded(pytester: pytest.Pytester, run: Any, recorded: dict[str, Any]) -> None:
    pytester.makepyfile(f"BAD = None\n{_OP_TESTS}")
    result = run("--tk-record", gpu=True)
    result.stdout.fnmatch_lines(["tk_zz.f: recorded, 2 tests"])
    run_facts = dict.fromkeys(("gpu", "driver", "torch", "cuda", "tilelang", "date"), "x")
    assert recorded == {"tk_zz.f": ({**run_facts, "arch": "sm_90a", "sanitizer": None}, {"one": "sm_90a"})}


@pytest.mark.parametrize(
    ("bad", "args", "line"),
    [
        ("None", ["-k", "one"], "tk_zz.f: not recorded, 0 failed, 1 of 2 did not pass"),
        ("'gpu-two'", [], "tk_zz.f: not recorded, 1 failed, 1 of 2 did not pass"),
        ("'modes-other-device-one'", [], "tk_zz.f: not recorded, 1 failed, 0 of 2 did not pass"),
    ],
)
def test_less_than_a_full_run_is_not_recorded(
    pytester: pytest.Pytester, run: Any, recorded: dict[str, Any], bad: str, args: list[str], line: str
) -> None:
    pytester.makepyfile(f"BAD = {bad}\n{_OP_TESTS}")
    run("--tk-record", *args, gpu=True).stdout.fnmatch_lines([line])
    assert recorded == {}


def test_lines_for_the_summary_are_printed_once(pytester: pytest.Pytester, run: Any) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [1, 2])
        def test_line(n, record_property):
            record_property("tk_line", "two new cases")
            pytest.skip("why")
        """
    )
    assert run(gpu=False).outlines.count("two new cases") == 1


def test_nothing_is_recorded_unless_asked(pytester: pytest.Pytester, run: Any, recorded: dict[str, Any]) -> None:
    pytester.makepyfile(f"BAD = None\n{_OP_TESTS}")
    run(gpu=True).assert_outcomes(passed=3)
    assert recorded == {}


def test_sanitizer_results_are_recorded(
    pytester: pytest.Pytester, run: Any, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tk_core.testing import sanitize

    asked = []

    def run_tool(sanitizer: str, tool: str, ops: list[str]) -> sanitize.Finding:
        asked.append((tool, tuple(ops)))
        return sanitize.Finding(tool, {"tk_zz.f": 3}, True, "")

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "sanitizer_version", lambda sanitizer: "2025.3")
    monkeypatch.setattr(sanitize, "run_tool", run_tool)
    pytester.makepyfile(f"BAD = None\n{_OP_TESTS}")
    result = run("--tk-record", "--tk-sanitize", gpu=True)
    assert result.ret == 0
    assert asked == [(tool, ("tk_zz.f",)) for tool in ("memcheck", "initcheck", "racecheck")]
    assert recorded["tk_zz.f"][0]["sanitizer"] == {"version": "2025.3", "cases": 3}

    monkeypatch.setattr(
        sanitize, "run_tool", lambda sanitizer, tool, ops: sanitize.Finding(tool, {}, tool != "racecheck", "bad")
    )
    result = run("--tk-sanitize", gpu=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["racecheck: FAILED, 0 cases"])
