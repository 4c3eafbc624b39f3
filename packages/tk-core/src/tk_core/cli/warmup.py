"""`tk warmup`: compile the kernels of named cases ahead of time, on any machine, in several processes."""

import multiprocessing
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tk_core.cli.select import select

if TYPE_CHECKING:
    from tk_core.kernel import KernelRequest
    from tk_core.testing import Case, OpSpec

Outcome = Literal["compiled", "cached", "failed"]


@dataclass(frozen=True)
class Job:
    """One kernel to compile, named so that another process can ask for it again: nothing in it needs pickling."""

    op: str
    case: str
    arch: str
    index: int
    """Which of the kernels that the case asks for."""
    kernel: str

    def __str__(self) -> str:
        return f"{self.kernel} for {self.arch} ({self.op}, {self.case})"


@dataclass
class Plan:
    """Kernels to compile, and what can't be."""

    jobs: list[Job]
    failures: list[str]
    unsupported: list[str]


def requests_of(spec: "OpSpec", case: "Case", arch_name: str) -> "list[KernelRequest]":
    """The kernels that a case launches on an architecture."""
    from tk_core.arch import arch_from_name
    from tk_core.kernel import capture

    with capture(arch_from_name(arch_name)) as captured:
        spec.op(**case.make("meta"))
    return list(captured)


def plan(specs: "dict[str, OpSpec]", archs: Sequence[str], wanted: "Callable[[Case], bool]") -> Plan:
    """Find the kernels of all wanted cases, each kernel once."""
    from tk_core.arch import UnsupportedArchError

    found = Plan([], [], [])
    seen: set[KernelRequest] = set()
    for op, spec in specs.items():
        for case in filter(wanted, spec.cases):
            for arch in archs:
                try:
                    requests = requests_of(spec, case, arch)
                except UnsupportedArchError as error:
                    found.unsupported.append(f"{op}, {case.name}: {error}")
                    continue
                except Exception as error:
                    found.failures.append(f"{op}, {case.name} for {arch}: {summary(error)}")
                    continue
                for index, request in enumerate(requests):
                    if request not in seen:
                        seen.add(request)
                        found.jobs.append(Job(op, case.name, arch, index, request.kernel.name))
    return found


def summary(error: BaseException) -> str:
    """The telling lines of an error; a compiler's carries the whole source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)] if len(lines) > 3 else lines
    return f"{type(error).__name__}: {' | '.join((telling or lines[-1:])[:3])}"


@lru_cache(maxsize=8)
def _worker_requests(op: str, case_name: str, arch: str) -> "list[KernelRequest]":
    from tk_core.testing import load_specs

    spec = load_specs(op.partition(".")[0])[op]
    case = next(case for case in spec.cases if case.name == case_name)
    return requests_of(spec, case, arch)


def compile_job(job: Job) -> tuple[Outcome, str]:
    """Compile one kernel in a worker process; says whether the cache had it, or what went wrong."""
    from tk_core import compat

    try:
        before = compat.num_compilations
        _worker_requests(job.op, job.case, job.arch)[job.index].compile()
    except Exception as error:
        return "failed", summary(error)
    return ("compiled" if compat.num_compilations > before else "cached"), ""


def _start_worker() -> None:
    # Ctrl-C is for the parent, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Forking would copy whatever CUDA and TileLang state this process has.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)


def run(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Outcome, str]]:
    """Compile in `workers` processes and yield each result as it comes.

    A compiler that takes its process down fails its own kernel only. Closing the iterator early ends the workers; the
    cache stays good, since TileLang publishes an entry by one rename.
    """
    waiting, alone = deque(jobs), deque[Job]()
    while waiting or alone:
        # When a pool breaks, any of the kernels in it may be at fault, so each of those is tried again by itself.
        queue, size = (alone, 1) if alone else (waiting, min(workers, len(waiting)))
        pool = _pool(size)
        running: dict[Future[tuple[Outcome, str]], Job] = {}
        try:
            while queue or running:
                while queue and len(running) < size:
                    running[pool.submit(compile_job, queue[0])] = queue[0]
                    queue.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running[future]
                    outcome, why = future.result()
                    del running[future]
                    yield job, outcome, why
        except BrokenProcessPool:
            if queue is waiting:
                alone.extend(running.values())
            elif running:
                yield next(iter(running.values())), "failed", "the compiler's process died"
        finally:
            if running:
                for child in multiprocessing.active_children():
                    child.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


def default_archs() -> list[str]:
    """The architecture of this machine's GPU, or the one TK_ARCH names. Raises typer.BadParameter without either."""
    import torch

    from tk_core import env
    from tk_core.arch import arch_from_name, get_arch

    if named := env.get("TK_ARCH"):
        return [arch_from_name(named).name]
    if torch.cuda.is_available():
        return list(dict.fromkeys(get_arch(index).name for index in range(torch.cuda.device_count())))
    raise typer.BadParameter("no GPU here and TK_ARCH is not set: name one, such as --arch sm_90a")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warmup(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", metavar="ARCH", help="Architecture such as sm_90a, may be repeated; by default this machine's."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes; by default one for each core.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="GLOB", help="Only cases of this name, of all cases; may be repeated."),
    ] = None,
    all_cases: Annotated[bool, typer.Option("--all", help="All cases, not only the warm-up set.")] = False,
) -> None:
    """Compile kernels ahead of time, without a GPU if need be.

    Kernels that are in the cache are not compiled again, so an interrupted run can be repeated. Exit code 1 if a kernel
    fails, 130 if interrupted.
    """
    from tk_core.arch import arch_from_name

    try:
        archs = list(dict.fromkeys(arch_from_name(name).name for name in arch)) if arch else default_archs()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    specs = select(targets or [])

    def wanted(candidate: "Case") -> bool:
        if case:
            return any(fnmatchcase(candidate.name, pattern) for pattern in case)
        return all_cases or candidate.warmup

    if not any(wanted(candidate) for spec in specs.values() for candidate in spec.cases):
        which = f"named {' or '.join(case)}" if case else "in the warm-up set; --all takes every case"
        raise typer.BadParameter(f"no case of {len(specs)} ops is {which}")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(highlight=False)
    planned = plan(specs, archs, wanted)
    counts: Counter[Outcome] = Counter(failed=len(planned.failures))
    failures = list(planned.failures)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()),
        *(TimeRemainingColumn(), TextColumn("{task.fields[last]}")),
    )
    results = run(planned.jobs, jobs or _num_cores())
    interrupted = False
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(", ".join(archs), total=len(planned.jobs), last="")
            for job, outcome, why in results:
                counts[outcome] += 1
                if outcome == "failed":
                    failures.append(f"{job}: {why}")
                progress.update(task, advance=1, last=job.op)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        results.close()

    for line in planned.unsupported:
        console.print(f"not served  {line}", soft_wrap=True, markup=False)
    for line in failures:
        console.print(f"failed  {line}", soft_wrap=True, markup=False)
    total = f"{counts['compiled']} compiled, {counts['cached']} cached already, {counts['failed']} failed"
    if interrupted:
        left = len(planned.jobs) + len(planned.failures) - counts.total()
        console.print(f"interrupted: {total}, {left} left; the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130)
    console.print(f"{total}, for {', '.join(archs)}", soft_wrap=True)
    raise typer.Exit(1 if failures else 0)
