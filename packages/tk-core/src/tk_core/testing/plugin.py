"""pytest plugin of the tk packages, loaded by `-p tk_core.testing.plugin` in the root configuration.

Tiers: tests marked gpu run where there is a GPU and are deselected, not skipped, where there is none; tests marked
compile run anywhere; all others are the cpu tier. Benchmarks (marked bench, in bench_*.py) run only with `-m bench` or
if their file is named. Each test starts from a random seed that depends on its name. With pytest-xdist each worker
gets one GPU; a gpu test waits until the memory that it declares is free, and fails if it takes more.
"""

import os
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tk_core import env

_MARKERS = (
    "gpu(arch=None, gib=1): needs a GPU, of this architecture if it names one, and gib or gib(parameters) GiB of it",
    "gpus(count): beside gpu: needs so many GPUs",
    "compile: compiles kernels, for which no GPU is needed",
    "bench: measures speed on a GPU; runs only with -m bench or if its file is named",
    "tk_case(op, test): which test of which op's spec this is",
)
_LEFT_OUT = pytest.StashKey[int]()
_SESSION = pytest.StashKey["_Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ours, all named --tk-*."""
    group = parser.getgroup("tk", "GPU kernels")
    group.addoption(
        "--tk-record",
        action="store_true",
        help="write gpu-verified.json for each op whose gpu tests all ran and passed",
    )
    group.addoption(
        "--tk-sanitize",
        action="store_true",
        help="afterwards run the small cases of the tested ops under compute-sanitizer",
    )
    group.addoption("--tk-results", metavar="FILE", type=Path, help="append benchmark results to FILE, as JSON lines")
    group.addoption(
        "--tk-baselines",
        choices=("none", "eager", "compiled"),
        default="compiled",
        help="what benchmarks compare with: nothing, the eager reference, or torch.compile of it too (default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare markers, pick this worker's GPU, reject -m gpu without one, collect benchmarks with -m bench."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        _take_gpu(workerinput)
    elif sys.dont_write_bytecode and hasattr(config, "cache"):
        _keep_bytecode(config.cache.mkdir("bytecode"))
    markexpr = config.option.markexpr
    for name in ("gpu", "bench"):
        if _requires(markexpr, name) and not _has_gpu():
            raise pytest.UsageError(f"-m {markexpr!r} needs a GPU and there is none here")
    if _requires(markexpr, "bench"):
        config.addinivalue_line("python_files", "bench_*.py")
    if workerinput is None:
        config.stash[_SESSION] = session = _Session(config)
        config.pluginmanager.register(session, "tk-session")


def _keep_bytecode(folder: Path) -> None:
    """Let this process and its children keep bytecode here where none may lie beside the sources.

    Else each process that a test starts would compile torch and TileLang anew, in 3 s.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    shutil.rmtree(folder / temporary.relative_to(temporary.anchor), ignore_errors=True)  # an earlier run's
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


# tryfirst: not every version of xdist calls its own implementation last.
@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: one per core, as kernels take seconds to compile, and 3 GiB of GPU; none for benchmarks."""
    named = (Path(argument.split("::")[0]).name for argument in config.args)
    if _requires(config.option.markexpr, "bench") or any(name.startswith("bench_") for name in named):
        return 0
    return max(min(os.cpu_count() or 1, 16, _gpu_gib() // 3), 1)


def _requires(markexpr: str, name: str) -> bool:
    """Whether a -m expression matches only tests with the marker `name`."""
    names = sorted({*re.findall(r"\w+", markexpr)} - {"and", "or", "not", name, "True", "False", "None"})
    if not re.search(rf"\b{name}\b", markexpr) or len(names) > 8:
        return False
    from _pytest.mark.expression import Expression

    expression = Expression.compile(markexpr)

    def matches(marked: bool) -> bool:
        choices = ({**dict(zip(names, values)), name: marked} for values in product((False, True), repeat=len(names)))
        return any(expression.evaluate(partial(_is_chosen, choice)) for choice in choices)

    return matches(True) and not matches(False)


def _is_chosen(choice: dict[str, bool], name: str, **_: Any) -> bool:
    return choice.get(name, False)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu_gib() -> int:
    """Memory of all GPUs together; without a GPU more than any has."""
    import torch

    if not _has_gpu():
        return 2**20
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return sum(device.total_memory for device in devices) // 2**30


# ---- selection


def _needs_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "bench"))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _runs_here(item: pytest.Item) -> bool:
    several = item.get_closest_marker("gpus")
    if several and several.args[0] > _num_gpus():
        return False
    marker = item.get_closest_marker("gpu")
    wanted = marker.kwargs.get("arch") if marker else None
    if wanted is None:
        return True
    from tk_core.arch import get_arch

    return get_arch().name == wanted


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a GPU, more GPUs than there are, or another GPU than this machine's."""
    needing = [item for item in items if _needs_gpu(item)]
    if not needing:
        return
    out = {item for item in needing if not _runs_here(item)} if _has_gpu() else set(needing)
    if out:
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=list(out))
        config.stash[_LEFT_OUT] = len(out)


# ---- seeds


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A test that takes it runs on a CPU, and where there is a GPU, on that too."""
    return request.param


@pytest.fixture(autouse=True)
def _tk_seed(request: pytest.FixtureRequest) -> None:
    import numpy as np
    import torch

    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ---- memory of the GPU


@pytest.fixture(autouse=True)
def _tk_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    markers = list(request.node.iter_markers("gpu"))
    if not markers:
        yield
        return
    from tk_core.testing import memory

    gib = next((marker.kwargs["gib"] for marker in markers if "gib" in marker.kwargs), 1)
    if callable(gib):
        gib = gib(request.node.callspec.params)
    with memory.gpu_memory(gib, getattr(request.config, "workerinput", {}).get("workercount", 1)):
        yield


@pytest.fixture(scope="session")
def tk_bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The session's `tk_core.testing.bench.Bench`."""
    from tk_core.testing.bench import Bench

    bench = Bench(baselines=request.config.option.tk_baselines)
    yield bench
    bench.close()


# ---- GPUs of pytest-xdist's workers


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker which GPUs there are: once it asks CUDA, it can no longer change CUDA_VISIBLE_DEVICES."""
    import torch

    named = env.get("CUDA_VISIBLE_DEVICES")
    node.workerinput["tk_gpus"] = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _take_gpu(workerinput: dict[str, Any]) -> None:
    gpus = workerinput.get("tk_gpus", [])
    worker = re.search(r"\d+$", workerinput["workerid"])
    if len(gpus) > 1 and worker:
        first = int(worker.group()) % len(gpus)
        # The other GPUs stay visible: some tests need a second one.
        env.put("CUDA_VISIBLE_DEVICES", ",".join(gpus[first:] + gpus[:first]))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker, report how many tests it deselected."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tk_left_out"] = session.config.stash.get(_LEFT_OUT, 0)


# ---- reports


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a gpu test that skips as failed, and note in the report which test of which op it is."""
    report = yield
    if not _needs_gpu(item):
        return report
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\na gpu test that skips where it could run counts as failed"
    marker = item.get_closest_marker("tk_case")
    if marker and item.get_closest_marker("gpu"):
        report.user_properties.append(("tk_case", [marker.kwargs["op"], marker.kwargs["test"]]))
    return report


class _Session:
    """Collects results from all reports; in the main process, not in xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.passed: defaultdict[str, set[str]] = defaultdict(set)
        self.failed: defaultdict[str, set[str]] = defaultdict(set)
        self.rows: list[dict[str, Any]] = []
        self.left_out = 0
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect results of ops' tests, rows of benchmarks and lines for the summary, as they come."""
        for name, value in report.user_properties:
            if name == "tk_case":
                op, test = value
                if report.failed or hasattr(report, "wasxfail"):
                    self.failed[op].add(test)
                elif report.passed and report.when == "call":
                    self.passed[op].add(test)
            elif name == "tk_bench" and report.when == "call":
                self._add_row(value)
            elif name == "tk_line" and report.when == "call" and value not in self.lines:
                self.lines.append(value)

    def _add_row(self, row: dict[str, Any]) -> None:
        from tk_core.testing.bench import append_row

        self.rows.append(row)
        if file := self.config.option.tk_results:
            append_row(file, row)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Read how many tests a worker deselected."""
        # Every worker collects all tests, so the numbers are equal and must not be added up.
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("tk_left_out", 0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run the sanitizer and write the records."""
        self.left_out = max(self.left_out, self.config.stash.get(_LEFT_OUT, 0))
        options = self.config.option
        if not (options.tk_sanitize or options.tk_record) or not self._ops():
            return
        sanitizer = self._sanitize(session) if options.tk_sanitize else {}
        if options.tk_record:
            self._record(sanitizer)

    def _ops(self) -> list[str]:
        return sorted({*self.passed, *self.failed})

    def _sanitize(self, session: pytest.Session) -> dict[str, Any]:
        from tk_core.testing import sanitize

        sanitizer = sanitize.find_sanitizer()
        if sanitizer is None:
            self.lines.append("compute-sanitizer: not found, nothing sanitized")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return {}
        findings = list(sanitize.run_tools(sanitizer, sanitize.TOOLS, self._ops()))
        self.lines.extend(sanitize.summaries(findings))
        if not all(found.passed for found in findings):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return sanitize.records(findings, sanitize.sanitizer_version(sanitizer))

    def _record(self, sanitizer: dict[str, Any]) -> None:
        from tk_core import ledger
        from tk_core.arch import get_arch
        from tk_core.testing import launches
        from tk_core.testing.machine import versions
        from tk_core.testing.specs import load_specs
        from tk_core.testing.tiers import gpu_test_names

        complete = []
        for op, spec in load_specs().items():
            if op not in self._ops():
                continue
            wanted = gpu_test_names(spec)
            missing = wanted - self.passed[op]
            if self.failed[op] or missing:
                what = f"{len(self.failed[op])} failed, {len(missing)} of {len(wanted)} did not pass"
                self.lines.append(f"{op}: not recorded, {what}")
                continue
            complete.append(op)
            self.lines.append(f"{op}: recorded, {len(wanted)} tests")
        found, arch = versions(), get_arch().name
        run = {key: found[key] for key in ("date", "gpu", "driver", "cuda", "torch", "tilelang")} | {"arch": arch}
        for op, hashes in zip(complete, launches.hashes_of_all(complete, arch)):
            ledger.record(op, {**run, "sanitizer": sanitizer.get(op)}, hashes)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was deselected, recorded, sanitized and measured."""
        if self.left_out:
            why = "for another architecture, or more GPUs" if _has_gpu() else "no GPU here"
            terminalreporter.write_line(f"{self.left_out} gpu tests left out: {why}")
        for line in self.lines:
            terminalreporter.write_line(line)
        if self.rows:
            from tk_core.testing.bench import format_rows

            terminalreporter.section("benchmarks")
            terminalreporter.write_line(format_rows(self.rows, terminalreporter.isatty))
