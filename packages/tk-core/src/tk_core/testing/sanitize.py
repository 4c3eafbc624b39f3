"""Small cases of ops under compute-sanitizer: `python -m tk_core.testing.sanitize [OP]...`, needs a GPU.

There is a process for each tool and group of ops, and as many run at a time as there are cores. Inputs are made on the
CPU and copied to the GPU, and references do not run, so nearly every kernel that the sanitizer slows down and checks is
one of ours. Kernels come from the compile cache.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "initcheck", "racecheck")
_ERROR_EXIT_CODE = 86
_OPS_A_PROCESS = 4  # starting one takes as long as the cases of a few ops
_DEFAULT_PATH = Path("/usr/local/cuda/bin/compute-sanitizer")


@dataclass(frozen=True)
class Finding:
    """Result of one tool for one run."""

    tool: str
    cases: dict[str, int]
    """Small cases that ran to their end, by op."""
    passed: bool
    output: str


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, if there is one."""
    return shutil.which("compute-sanitizer") or (str(_DEFAULT_PATH) if _DEFAULT_PATH.exists() else None)


def sanitizer_version(sanitizer: str) -> str | None:
    """Version of compute-sanitizer, such as 2025.3.1.0."""
    printed = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"[Vv]ersion\s+([\d.]+)", printed)
    return found.group(1) if found else None


def command(sanitizer: str, tool: str, ops: Iterable[str]) -> list[str]:
    """The command line that runs a tool over the small cases of some ops."""
    # API errors are not reported: torch makes calls that may fail, to find out what a device can do.
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return [
        # In memory of torch's caching allocator the sanitizer cannot tell where one tensor ends.
        *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"),
        *(sanitizer, "--tool", tool, *options, "--error-exitcode", str(_ERROR_EXIT_CODE), "--print-limit", "20"),
        *(sys.executable, "-m", "tk_core.testing.sanitize", *ops),
    ]


def run_tool(sanitizer: str, tool: str, ops: Iterable[str]) -> Finding:
    """Run one tool over the small cases of some ops and wait for it."""
    done = subprocess.run(
        command(sanitizer, tool, ops), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return finding(tool, done.returncode, done.stdout)


def run_tools(sanitizer: str, tools: Sequence[str], ops: Sequence[str]) -> Iterator[Finding]:
    """Run tools over the small cases of ops; yields a finding for each tool and group of ops."""
    shares = [ops[i : i + _OPS_A_PROCESS] for i in range(0, len(ops), _OPS_A_PROCESS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(run_tool, sanitizer, tool, share) for tool in tools for share in shares]
        yield from (run.result() for run in runs)


def finding(tool: str, exit_code: int, output: str) -> Finding:
    """The result of one tool's run, from its exit code and output."""
    cases: dict[str, int] = {}
    for op in re.findall(r"^tk: done (\S+) \S+$", output, re.MULTILINE):
        cases[op] = cases.get(op, 0) + 1
    # The sanitizer exits with 0 if it could not attach at all, but then it prints no summary of errors.
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    clean = summary is not None and not any(int(count) for count in summary.groups() if count)
    return Finding(tool, cases, exit_code == 0 and clean and "tk: all done" in output, output)


def records(findings: Sequence[Finding], version: str | None) -> dict[str, dict[str, int | str | None]]:
    """The ledger's sanitizer entry of each op that passed every tool: the tools' version and the op's small cases."""
    ran: dict[str, dict[str, int]] = {tool: {} for tool in TOOLS}
    for found in findings:
        if found.passed:
            ran[found.tool].update(found.cases)
    ops = sorted(set.intersection(*map(set, ran.values())))
    return {op: {"version": version, "cases": min(cases[op] for cases in ran.values())} for op in ops}


def summaries(findings: Sequence[Finding]) -> Iterator[str]:
    """For each tool, an excerpt of each failed run and then one line with the tool's result."""
    for tool in dict.fromkeys(found.tool for found in findings):
        of_tool = [found for found in findings if found.tool == tool]
        failed = [found for found in of_tool if not found.passed]
        yield from (excerpt(found.output) for found in failed)
        num_cases = sum(sum(found.cases.values()) for found in of_tool)
        yield f"{tool}: {'FAILED' if failed else 'clean'}, {num_cases} cases"


def _run_cases(ops: Sequence[str]) -> None:
    """What runs inside the sanitizer: every small case once."""
    import torch

    from tk_core.testing.specs import load_specs
    from tk_core.testing.trees import transfer

    for name, spec in load_specs().items():
        if name not in ops:
            continue
        for case in spec.cases:
            if not (case.small and case.gpu):
                continue
            torch.manual_seed(0)
            kwargs = transfer(case.make("cpu"), "cuda")
            print(f"tk: case {name} {case.name}", flush=True)
            spec.op(**kwargs)
            torch.cuda.synchronize()
            print(f"tk: done {name} {case.name}", flush=True)
    print("tk: all done", flush=True)


def excerpt(output: str, lines: int = 60) -> str:
    """The part of a sanitizer's output from its first complaint on, after the line of the case that was running."""
    every = output.splitlines()
    complaints = (i for i, line in enumerate(every) if line.startswith("=========") and "COMPUTE-SANITIZER" not in line)
    first = next(complaints, len(every))
    case = next((line for line in reversed(every[:first]) if line.startswith("tk: case")), "")
    return "\n".join([case, *every[first : first + lines]] if first < len(every) else every[-lines:])


if __name__ == "__main__":
    _run_cases(sys.argv[1:])
