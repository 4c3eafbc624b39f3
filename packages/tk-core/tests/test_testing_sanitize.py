"""tk_core.testing.sanitize: the command it runs and what it makes of the output."""

import sys

import pytest

from tk_core.testing import sanitize
from tk_core.testing.sanitize import Finding

_CASES = """========= COMPUTE-SANITIZER
tk: case tk_zz.f one
tk: done tk_zz.f one
tk: case tk_zz.f two
tk: done tk_zz.f two
tk: case tk_zz.g one
tk: done tk_zz.g one
tk: all done
"""
_CLEAN = f"{_CASES}========= ERROR SUMMARY: 0 errors\n"
_RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)\n"


def test_command() -> None:
    command = sanitize.command("/bin/compute-sanitizer", "initcheck", ["tk_zz.f"])
    assert command[:2] == ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    assert command[2:5] == ["/bin/compute-sanitizer", "--tool", "initcheck"]
    assert command[-4:] == [sys.executable, "-m", "tk_core.testing.sanitize", "tk_zz.f"]


@pytest.mark.parametrize(
    ("exit_code", "output", "passed"),
    [
        (0, _CLEAN, True),
        (0, _CASES + _RACES.format(0, 0), True),
        (86, _CASES + _RACES.format(2, 2), False),
        (0, _CASES + _RACES.format(2, 2), False),
        (86, f"{_CASES}========= ERROR SUMMARY: 12 errors\n", False),
        (86, _CLEAN, False),
        (0, _CASES, False),  # not attached
        (0, "========= ERROR SUMMARY: 0 errors\n", False),  # no cases
        (1, _CLEAN.replace("tk: all done\n", ""), False),  # died half way
    ],
)
def test_verdicts(exit_code: int, output: str, passed: bool) -> None:
    assert sanitize.finding("memcheck", exit_code, output).passed is passed


def test_cases_are_counted_by_op() -> None:
    assert sanitize.finding("memcheck", 0, _CLEAN).cases == {"tk_zz.f": 2, "tk_zz.g": 1}


def test_records_need_every_tool() -> None:
    clean = [Finding(tool, {"tk_zz.f": 2, "tk_zz.g": 1}, True, "") for tool in sanitize.TOOLS]
    assert sanitize.records(clean, "2025.3")["tk_zz.f"] == {"version": "2025.3", "cases": 2}
    assert sanitize.records([*clean[:2], Finding("racecheck", {"tk_zz.f": 2}, True, "")], None).keys() == {"tk_zz.f"}
    assert sanitize.records([*clean[:2], Finding("racecheck", {"tk_zz.f": 2}, False, "")], None) == {}
    assert sanitize.records([], None) == {}


def test_records_of_ops_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_tool(sanitizer: str, tool: str, ops: list[str]) -> Finding:
        return Finding(tool, dict.fromkeys(ops, 2), "f3" not in ops or tool != "initcheck", "========= complaint")

    monkeypatch.setattr(sanitize, "run_tool", run_tool)
    findings = list(sanitize.run_tools("sanitizer", sanitize.TOOLS, [f"f{i}" for i in range(10)]))
    assert sanitize.records(findings, None).keys() == {"f4", "f5", "f6", "f7", "f8", "f9"}
    lines = list(sanitize.summaries(findings))
    assert [line for line in lines if "cases" in line] == [
        "memcheck: clean, 20 cases",
        "initcheck: FAILED, 20 cases",
        "racecheck: clean, 20 cases",
    ]
    assert any("complaint" in line for line in lines)


def test_excerpt_begins_at_the_first_complaint() -> None:
    output = _CASES.replace(
        "tk: done tk_zz.f two", "========= Invalid __global__ write of size 4 bytes\n=========     at kernel+0x10"
    )
    lines = sanitize.excerpt(output, lines=2).splitlines()
    assert lines == [
        "tk: case tk_zz.f two",
        "========= Invalid __global__ write of size 4 bytes",
        "=========     at kernel+0x10",
    ]
    assert sanitize.excerpt("Device not supported").strip() == "Device not supported"
