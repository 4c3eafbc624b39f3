"""`tk list`, `tk warmup` and `tk verify` on a package made for the purpose, whose kernels take no compiler."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tk_core import compat, ledger
from tk_core.cli import app, workers
from tk_core.cli.plan import Job
from tk_core.cli.select import records_of, select, specs_of
from tk_core.testing import launches

# "Compiling" leaves a file, so that the next run finds it.
_OPS = '''
import os
import subprocess
from pathlib import Path

import torch
from tk_core import compat
from tk_core.arch import get_arch
from tk_core.compat import CompiledKernel
from tk_core.op import launching, new, op
from tk_core.kernel import Kernel

FOLDER = Path(__file__).parent / "compiled" / "{name}"


class FakeKernel(Kernel):
    def compile(self, *args):
        *key, arch = args
        path = FOLDER / "-".join(map(str, (self.name.rpartition(".")[2], *key, arch.name)))
        if key == [13]:
            raise RuntimeError("source code\\n" * 100 + "kernel.cu(3): error: 13 is unlucky\\nCommand: nvcc")
        if key == [666]:
            os._exit(9)
        if key[0] >= 1000:
            subprocess.run(["sleep", "0.4"])
        if not path.exists():
            compat.num_compilations += 1
            if key != [28]:
                path.write_text("")
        return CompiledKernel("copy_rows", print, path, str)


def _kernel(build):
    return FakeKernel(build, {{}}, ())


@_kernel
def one(cols, arch):
    """A kernel."""


@_kernel
def two(cols, arch):
    """Another kernel."""


@op(min_sm={min_sm})
def {name}(x: torch.Tensor) -> torch.Tensor:
    """A copy."""
    out = new(torch.empty_like, x)
    if launching(out):
        arch = get_arch(x.device)
        if x.shape[1] == 7:
            raise ValueError("x: expected other than 7 columns")
        one(x.shape[1], arch)(x, out)
        if x.shape[1] % 2 or (x.shape[1] < 8 and 300 < x.shape[0] < 340):
            two(x.shape[1], arch)(x, out)
    return out
'''

_SPEC = """
import torch
from tk_core.testing import Case, OpSpec
from {package}.{name} import {name}
from {package}.reference.{name} import {name} as reference


def make(cols, tokens=4):
    return lambda device: {{"x": torch.zeros(tokens, cols, device=device)}}


SPEC = OpSpec(
    op={name},
    reference=reference,
    cases=(
        Case("c8", make(8), compile=True, small=True, model_shape=True),
        Case("c8-t9", make(8, 9), model_shape=True),
        Case("c9", make(9), small=True, model_shape=True),
        Case("c10", make(10), small=True),
        Case("bad-c13", make(13)),
        Case("fatal-c666", make(666)),
        Case("unstored-c28", make(28)),
        *(Case(f"slow-c{{c}}", make(c)) for c in range(1000, 1012, 2)),
    ),
)
"""

_WARMUP = """
from dataclasses import dataclass

import torch
import {package}


@dataclass(frozen=True)
class Profile:
    cols: tuple[int, ...]
    dtype: str = "float32"


def calls(profile, num_tokens):
    for cols in profile.cols:
        x = torch.empty(num_tokens, cols, dtype=getattr(torch, profile.dtype), device="meta")
        yield {package}.copy_rows, {{"x": x}}
        yield {package}.copy_new, {{"x": x}}
"""

_INIT = "from tk_core.lazy import export_stub\nexport_stub(__name__, __file__)\n"
_STUB = "from .copy_new import copy_new as copy_new\nfrom .copy_rows import copy_rows as copy_rows\n"

PACKAGE = "tk_cli_test_ops"


def _write(folder: Path, op: str, min_sm: int) -> None:
    names = {"package": PACKAGE, "name": op, "min_sm": min_sm}
    (folder / f"{op}.py").write_text(_OPS.format(**names))
    (folder.parents[1] / "tests" / f"test_{op}.py").write_text(_SPEC.format(**names))
    (folder / "reference" / f"{op}.py").write_text(f"def {op}(x):\n    return x.clone()\n")


@pytest.fixture(scope="module")
def _package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    project = tmp_path_factory.mktemp("ops") / "packages" / "tk-cli-test-ops"
    folder = project / "src" / PACKAGE
    for each in (folder / "reference", project / "tests"):
        each.mkdir(parents=True)
    (folder / "reference" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(_INIT)
    (folder / "__init__.pyi").write_text(_STUB)
    (folder / "warmup.py").write_text(_WARMUP.format(package=PACKAGE))
    _write(folder, "copy_rows", 80)
    _write(folder, "copy_new", 90)
    sys.path.insert(0, str(folder.parent))
    yield folder
    sys.path.remove(str(folder.parent))


@pytest.fixture
def package(_package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, nothing compiled yet, and both ops waiting for a GPU."""
    shutil.rmtree(_package / "compiled", ignore_errors=True)
    for op in ("copy_rows", "copy_new"):
        (_package / "compiled" / op).mkdir(parents=True)
    records = {f"{PACKAGE}.{op}": {"pending": "new"} for op in ("copy_rows", "copy_new")}
    (_package / "gpu-verified.json").write_text(json.dumps(records))
    monkeypatch.delenv("TK_ARCH", raising=False)
    return _package


def tk(*arguments: str) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, list(arguments))


def shown(result: Any) -> str:
    """What the command printed, without the frame and the line breaks of an error."""
    return " ".join(result.output.replace("│", " ").split())


def compiled(package: Path, op: str = "copy_rows") -> list[str]:
    """An op's kernels that were compiled, by kernel, columns and architecture."""
    return sorted(path.name for path in (package / "compiled" / op).iterdir())


def test_list(package: Path) -> None:
    result = tk("list", PACKAGE, "--json")
    assert result.exit_code == 0, result.output
    rows = {row["op"]: row for row in json.loads(result.output)}
    assert list(rows) == [f"{PACKAGE}.copy_new", f"{PACKAGE}.copy_rows"]
    old = rows[f"{PACKAGE}.copy_rows"]
    assert old["what"] == "A copy."
    assert old["signature"] == "copy_rows(x: torch.Tensor) -> torch.Tensor"
    assert old["reference"] == f"{PACKAGE}.reference.copy_rows"
    assert (old["state"], old["reason"]) == ("pending", "new")
    assert [row["min_sm"] for row in rows.values()] == [90, 80]
    text = tk("list", f"{PACKAGE}.copy_new").output
    assert re.search(rf"{PACKAGE}\.copy_new +sm_90 +pending +A copy\.", text)
    assert "copy_rows" not in text


def test_list_takes_a_name_with_dashes_and_an_op_by_itself(package: Path) -> None:
    for targets in ([PACKAGE.replace("_", "-")], [PACKAGE, "copy_rows"]):
        assert len(json.loads(tk("list", *targets, "--json").output)) == 2


def test_a_package_without_ops_stands_for_those_it_is_built_on() -> None:
    found = {op.partition(".")[0] for op in select(["tk-modeling"], records_of)}
    assert found == {"tk_quant", "tk_moe", "tk_engram", "tk_mhc", "tk_gemm"}


def test_every_package_here_can_be_listed() -> None:
    result = tk("list", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert {row["op"] for row in rows} == set(select([], specs_of))
    assert all(row["what"] for row in rows)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model that calls both ops."""
    file = tmp_path / "model.toml"
    file.write_text(f"max_tokens = 1000\n[{PACKAGE}]\ncols = [8, 9]\n")
    return str(file)


def test_warmup_compiles_each_kernel_of_a_model_once(package: Path, model: str) -> None:
    (package / "compiled" / "copy_new" / "one-8-sm_90a").write_text("")
    result = tk("warmup", PACKAGE, "--model", model, "--arch", "sm_90a,sm_100", "-j", "2")
    assert result.exit_code == 0, result.output
    assert "11 compiled, 1 cached already, 0 failed, for sm_90a, sm_100a" in result.output
    kernels = [f"{name}-{arch}" for name in ("one-8", "one-9", "two-9") for arch in ("sm_100a", "sm_90a")]
    assert compiled(package) == compiled(package, "copy_new") == kernels
    # Where there is no terminal, a line says what became of each.
    assert sum(line.startswith(("compiled", "cached")) for line in result.output.splitlines()) == 12


def test_warmup_of_one_op_with_another_value(package: Path, jobs: list[Job], model: str) -> None:
    result = tk("warmup", f"{PACKAGE}.copy_rows", "--model", model, "--set", "cols=[16]", "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert list(map(str, jobs)) == [f"{PACKAGE}.copy_rows.one for sm_90a ({PACKAGE}.copy_rows)"]
    assert jobs[0].args[0] == 16


def test_warmup_finds_a_kernel_between_two_numbers_of_tokens(package: Path, jobs: list[Job], model: str) -> None:
    """With four columns, 301 to 339 rows take another kernel; powers of two, and halfway, are beside that."""
    options = ("--model", model, "--set", "cols=[4]", "--set", "max_tokens=320", "--arch", "sm_90a")
    assert tk("warmup", "copy_rows", PACKAGE, *options).exit_code == 0
    assert {job.kernel.rpartition(".")[2] for job in jobs} == {"one", "two"}


def test_warmup_of_calls_that_fail(package: Path, jobs: list[Job], model: str) -> None:
    result = tk("warmup", f"{PACKAGE}.copy_rows", "--model", model, "--set", "cols=[7, 8]", "--arch", "sm_90a")
    assert result.exit_code == 1
    # Once, however many tokens.
    assert result.output.count("expected other than 7 columns") == 1
    assert [job.args[0] for job in jobs] == [8]


def test_warmup_names_failures_and_does_the_rest(package: Path) -> None:
    arguments = ("--arch", "sm_90a", "--jobs", "2", *cases("bad-*", "fatal-*", "unstored-*", "c*"))
    result = tk("warmup", f"{PACKAGE}.copy_rows", *arguments)
    assert result.exit_code == 1
    assert "4 failed" in result.output
    failed = [line for line in result.output.splitlines() if line.startswith("failed")]
    assert len(failed) == 4
    unlucky = [line for line in failed if "bad-c13" in line]
    assert len(unlucky) == 2, "one and two"
    assert all("error: 13 is unlucky" in line and "source code" not in line for line in unlucky)
    assert any("fatal-c666" in line and "process died" in line for line in failed)
    assert any("unstored-c28" in line and "not stored" in line for line in failed)
    assert compiled(package) == ["one-10-sm_90a", "one-8-sm_90a", "one-9-sm_90a", "two-9-sm_90a"]


def test_warmup_shows_a_bar_on_a_terminal(
    package: Path, jobs: list[Job], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    result = tk("warmup", PACKAGE, "--model", model, "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert "6/6" in result.output
    assert not re.search(rf"^compiled +{PACKAGE}", result.output, re.MULTILINE)


def test_warmup_without_a_place_for_kernels(package: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", f"{model}/cache")
    result = tk("warmup", PACKAGE, "--model", model, "--arch", "sm_90a")
    assert result.exit_code == 1
    assert "TILELANG_CACHE_DIR=" in result.output
    assert compiled(package) == []


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that a warm-up would do; none is done."""
    found: list[Job] = []

    def run(jobs: list[Job], _: int) -> Iterator[tuple[Job, workers.Result]]:
        found.extend(jobs)
        yield from ((job, workers.Result("compiled")) for job in jobs)

    monkeypatch.setattr(workers, "run", run)
    return found


def test_warmup_looks_for_what_a_read_only_cache_lacks(
    package: Path, jobs: list[Job], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", f"{model}/cache")
    monkeypatch.setenv("TK_COMPILE", "forbid")
    assert tk("warmup", PACKAGE, "--model", model, "--arch", "sm_90a").exit_code == 0
    assert jobs


def test_warmup_says_what_an_architecture_does_not_serve(package: Path, jobs: list[Job]) -> None:
    result = tk("warmup", PACKAGE, "--arch", "sm_80", *cases("c8"))
    assert result.exit_code == 0, result.output
    assert "not served" in result.output
    assert "sm_90 or newer" in result.output
    assert [job.asked_by for job in jobs] == [f"{PACKAGE}.copy_rows, c8"]


def test_warmup_takes_the_architecture_from_the_environment(
    package: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TK_ARCH", "sm_100a")
    assert tk("warmup", f"{PACKAGE}.copy_rows", *cases("c8", "c9")).exit_code == 0
    kernels = [(job.kernel.rpartition(".")[2], job.args[0], job.args[1].name) for job in jobs]
    assert kernels == [("one", 8, "sm_100a"), ("one", 9, "sm_100a"), ("two", 9, "sm_100a")]


def test_warmup_of_all_cases(package: Path, jobs: list[Job]) -> None:
    assert tk("warmup", f"{PACKAGE}.copy_rows", "--arch", "sm_90a", *cases("*")).exit_code == 0
    # c8 and c8-t9 ask for the same kernel.
    assert len(jobs) == 1 + 2 + 1 + 2 + 1 + 1 + 6


WARM_UP = ("warmup", PACKAGE, "--arch", "sm_90a")
WITH_MODEL = (*WARM_UP, "--model", "MODEL")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", f"{PACKAGE}.copy_row"), f"did you mean {PACKAGE}.copy_rows?"),
        (("list", "tk-core", PACKAGE), "'tk_core': expected a package"),
        (("verify", "tk-core", PACKAGE), "'tk_core': expected a package"),
        ((*WITH_MODEL, "--set", "colls=[3]"), "did you mean cols?"),
        ((*WITH_MODEL, "--set", "cols=3"), "expected a list"),
        ((*WITH_MODEL, "--set", "cols=[true]"), "expected a value of type int"),
        ((*WITH_MODEL, "--set", f"{PACKAGE}.cols=['a']"), "expected a value of type int"),
        ((*WITH_MODEL, "--set", "tk_other.cols=[3]"), f"with a section of {PACKAGE}"),
        ((*WITH_MODEL, "--set", "cols"), "expected KEY=VALUE"),
        ((*WITH_MODEL, "--set", "max_tokens=0"), "expected at least 1"),
        ((*WITH_MODEL, "--set", f"max_tokens={10**30}"), "less than 2**31"),
        ((*WITH_MODEL, "--set", "dtype=float33"), "float33"),
        (("warmup", "--model", "deepseek-v2", "--arch", "sm_90a"), "deepseek-v3, deepseek-v3.2, deepseek-v4-flash"),
        (("warmup", PACKAGE), "--arch sm_90a"),
        (("warmup", PACKAGE, "--arch", "sm_42"), "expected one of sm_80"),
        ((*WARM_UP, "--case", "nothing-*"), "no case of 2 ops is named 'nothing-*'"),
        ((*WARM_UP, "--case", "c8", "--case", "nothing-*"), "no case of 2 ops is named 'nothing-*'"),
        ((*WARM_UP, "--model", "deepseek-v3"), f"{PACKAGE}: deepseek-v3 calls none of it"),
        ((*WARM_UP, "--case", "c8", "--set", "cols=[3]"), "--case: expected no --model"),
        (("verify", "--pending", PACKAGE, "two ops"), "expected one op"),
        (("verify", "--pending", f"{PACKAGE}.copy_rows", " "), "expected a reason"),
        (("verify", "--pending", PACKAGE, "why", PACKAGE), "nothing beside it"),
    ],
)
def test_usage_errors(
    package: Path, model: str, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = (package / "gpu-verified.json").read_text()
    result = tk(*(model if argument == "MODEL" else argument for argument in arguments))
    assert result.exit_code == 2, result.exception
    assert message in shown(result)
    assert compiled(package) == []
    assert (package / "gpu-verified.json").read_text() == before


def test_warmup_drops_no_op_in_silence(
    package: Path, jobs: list[Job], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two that the model never calls, or that has no such case, is an error; so is a model without sections."""
    ops = [f"{PACKAGE}.copy_rows", f"{PACKAGE}.copy_new"]
    warm_up = importlib.import_module(f"{PACKAGE}.warmup")
    calls = warm_up.calls
    monkeypatch.setattr(warm_up, "calls", lambda *args: (call for call in calls(*args) if "rows" in call[0].__name__))
    result = tk("warmup", *ops, "--model", model, "--arch", "sm_90a")
    assert result.exit_code == 2
    assert f"{ops[1]}: {model} calls none of it" in shown(result)
    assert tk("warmup", ops[0], PACKAGE, "--model", model, "--arch", "sm_90a").exit_code == 0
    spec = select([ops[1]], specs_of)[ops[1]]
    monkeypatch.setitem(vars(spec), "cases", spec.cases[:1])
    result = tk("warmup", *ops, "--arch", "sm_90a", *cases("c9"))
    assert result.exit_code == 2
    assert f"{ops[1]}: it has no case named c9" in shown(result)
    Path(model).write_text("max_tokens = 10\n")
    result = tk("warmup", "--model", model, "--arch", "sm_90a")
    assert result.exit_code == 2
    assert f"{model}: expected sections" in shown(result)


def cases(*patterns: str) -> list[str]:
    """Options that choose cases."""
    return [option for pattern in patterns for option in ("--case", pattern)]


def start_slow_warmup(package: Path) -> subprocess.Popen[str]:
    """Warm-up in a process of its own, with two kernels compiled and four to go."""
    # A shell starts what runs in its background with interrupts ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from tk_core.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "warmup", f"{PACKAGE}.copy_rows", *SLOW]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(compiled(package)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


SLOW = ["--arch", "sm_90a", "--jobs", "1", *cases("slow-*")]


def test_warmup_goes_on_after_an_interrupt(package: Path) -> None:
    process = start_slow_warmup(package)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "goes on from here" in output
    done = len(compiled(package))
    assert 2 <= done < 6
    result = tk("warmup", f"{PACKAGE}.copy_rows", *SLOW)
    assert result.exit_code == 0
    assert f"{6 - done} compiled, {done} cached already" in result.output


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_nothing_is_left_running_after_sigterm(package: Path) -> None:
    process = start_slow_warmup(package)
    started = descendants(process.pid)
    assert started, "expected worker processes"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    deadline = time.monotonic() + 10
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if is_running(pid)]


def test_verify(package: Path) -> None:
    (package / "gpu-verified.json").unlink()
    assert tk("verify", PACKAGE).exit_code == 1
    result = tk("verify", f"{PACKAGE}.copy_rows")
    assert result.exit_code == 1
    assert "missing" in result.output
    assert tk("verify", "--pending", f"{PACKAGE}.copy_rows", "waits for an H200").exit_code == 0
    result = tk("verify", f"{PACKAGE}.copy_rows")
    assert result.exit_code == 0, result.output
    assert "pending" in result.output
    assert "waits for an H200" in result.output
    rows = json.loads(tk("verify", PACKAGE, "--json").output)
    assert [row["state"] for row in rows] == ["missing", "pending"]
    listed = json.loads(tk("list", "copy_rows", PACKAGE, "--json").output)
    assert {row["op"]: row["reason"] for row in listed} == {f"{PACKAGE}.copy_rows": "waits for an H200"}


def test_verify_and_cases_need_a_checkout(package: Path) -> None:
    tests = package.parents[1] / "tests"
    try:
        tests.rename(tests.with_name("elsewhere"))
        for arguments in (("verify",), ("warmup", "--arch", "sm_90a", *cases("*"))):
            result = tk(*arguments, PACKAGE)
            assert result.exit_code == 2
            assert f"{PACKAGE}: its cases are in the repository" in shown(result)
    finally:
        tests.with_name("elsewhere").rename(tests)


@pytest.mark.parametrize(
    ("now", "exit_code", "line"),
    [
        ("1", 0, "verified {op}; H200, 2026-11-26; 1 ops, none missing or stale"),
        ("2", 1, "stale {op}; H200, 2026-11-26; launches something else since 2026-11-26 in c8; 1 ops, 1 missing"),
    ],
)
def test_verify_compares(package: Path, monkeypatch: pytest.MonkeyPatch, now: str, exit_code: int, line: str) -> None:
    op = f"{PACKAGE}.copy_rows"
    run = {"gpu": "H200", "date": "2026-11-26", "sanitizer": {"cases": 1}, "tilelang": compat.tilelang_version()}
    ledger.record(op, run, {"c8": "1"})
    monkeypatch.setattr(launches, "hashes_of", lambda op, arch=None: {"c8": now})
    result = tk("verify", op)
    assert result.exit_code == exit_code
    assert line.format(op=op) in "; ".join(" ".join(each.split()) for each in result.output.splitlines())


def test_help_and_version() -> None:
    commands = ("doctor", "list", "warmup", "verify", "cache")
    assert all(command in tk("--help").output for command in commands)
    assert all(tk(command, "--help").exit_code == 0 for command in commands)
    assert tk("--version").output.startswith("tk-core 0.")


def test_help_needs_neither_torch_nor_tilelang() -> None:
    code = "import sys, tk_core.cli; assert not {'torch', 'tilelang', 'rich'} & sys.modules.keys(), 'slow to start'"
    subprocess.run([sys.executable, "-c", code], check=True)
