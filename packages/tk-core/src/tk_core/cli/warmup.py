"""`tk warmup`: compile a model's kernels ahead of time, on any machine, in several processes."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from tk_core.cli import profile, workers
from tk_core.cli.plan import Job, Plan, ops_called, plan_cases, plan_model
from tk_core.cli.select import records_of, select, select_each, specs_of

if TYPE_CHECKING:
    from rich.console import Console

    from tk_core.testing import Case

DEFAULT_MODEL = "deepseek-v3"


def _archs(named: list[str] | None) -> list[str]:
    """The architectures that a command line names, else TK_ARCH, else those of this machine's GPUs."""
    import torch

    from tk_core import env
    from tk_core.arch import arch_from_name, get_arch

    names = [name for text in named or () for name in text.split(",") if name] or [env.get("TK_ARCH")]
    try:
        if names[0]:
            return list(dict.fromkeys(arch_from_name(name).name for name in names))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if torch.cuda.is_available():
        return list(dict.fromkeys(get_arch(index).name for index in range(torch.cuda.device_count())))
    raise typer.BadParameter("no GPU here and TK_ARCH is not set: name one, such as --arch sm_90a")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plan_for_model(
    model: str, overrides: list[str], targets: list[str], archs: list[str], num_sms: int | None
) -> Plan:
    try:
        loaded = profile.load(model, overrides)
        called = set(ops_called(loaded))
    except profile.ProfileError as error:
        raise typer.BadParameter(str(error)) from error
    except Exception as error:  # sizes of which no arguments can be made
        raise typer.BadParameter(f"{model}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    if not called:
        raise typer.BadParameter(f"{model}: expected sections of packages that are installed, such as [tk_moe]")

    def ops_of(package: str) -> dict[str, None]:
        return dict.fromkeys([*records_of(package), *(op for op in called if op.startswith(f"{package}."))])

    wanted = {target: called & ops.keys() for target, ops in select_each(targets, ops_of).items()}
    if unused := [target for target, ops in wanted.items() if not ops]:
        raise typer.BadParameter(f"{', '.join(unused)}: {model} calls none of it; --set changes a value of the model")
    return plan_model(loaded, archs, set().union(*wanted.values()) or called, num_sms)


def _plan_for_cases(patterns: list[str], targets: list[str], archs: list[str]) -> Plan:
    specs = select(targets, specs_of)

    def wanted(case: "Case", patterns: list[str] = patterns) -> bool:
        return any(fnmatchcase(case.name, pattern) for pattern in patterns)

    for pattern in patterns:
        if not any(wanted(case, [pattern]) for spec in specs.values() for case in spec.cases):
            raise typer.BadParameter(f"--case: no case of {len(specs)} ops is named {pattern!r}")
    for target, chosen in select_each(targets, specs_of).items():
        if not any(wanted(case) for spec in chosen.values() for case in spec.cases):
            raise typer.BadParameter(f"{target}: it has no case named {' or '.join(patterns)}")
    return plan_cases(specs, archs, wanted)


def _require_writable_cache() -> None:
    from tk_core import env
    from tk_core.compat import cache_dir
    from tk_core.faults import cache_fault

    # Where nothing is compiled, nothing is written: what is missing in a read-only cache can be listed.
    if (fault := cache_fault(cache_dir())) and not env.compiling_is_forbidden():
        typer.echo(f"nothing compiled: {fault}", err=True)
        raise typer.Exit(1)


def _report(
    results: Iterator[tuple[Job, workers.Result]], counts: Counter[str], total: int, console: "Console"
) -> None:
    """Count results as they come and show them: failures, and on a terminal a bar, else a line each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()),
        *(TimeRemainingColumn(), TextColumn("{task.fields[last]}")),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("kernels", total=total, last="")
        for job, result in results:
            counts[result.outcome] += 1
            if result.outcome == "failed":
                console.print(f"failed    {job}: {result.why}", soft_wrap=True, markup=False)
            elif not console.is_terminal:
                line = f"{result.outcome:<9} {job}, {result.seconds:.1f} s [{counts.total()}/{total}]"
                console.print(line, soft_wrap=True, markup=False)
            progress.update(task, advance=1, last=job.asked_by)


def warmup(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME|FILE", help=f"{', '.join(profile.shipped())} or a TOML file [{DEFAULT_MODEL}]."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the model; may be repeated."),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="ARCH,...", help="Such as sm_90a,sm_100a; by default this machine's."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes; by default one for each core.")
    ] = None,
    num_sms: Annotated[
        int | None,
        typer.Option("--num-sms", min=1, help="Multiprocessors, where the GPU has fewer than its architecture's best."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="GLOB", help="Instead of a model: cases of tests of this name; '*' for all."),
    ] = None,
) -> None:
    """Compile the kernels that a model takes, ahead of time, without a GPU if need be.

    Kernels that are in the cache are not compiled again, so an interrupted run can be repeated. Exit code 1 if a kernel
    fails or can't be stored, 130 if interrupted, 143 if terminated.
    """
    if case and (model or overrides or num_sms):
        raise typer.BadParameter("--case: expected no --model, --set or --num-sms beside it")
    archs, targets = _archs(arch), targets or []
    try:
        with workers.terminable():
            _require_writable_cache()
            if case:
                plan = _plan_for_cases(case, targets, archs)
            else:
                plan = _plan_for_model(model or DEFAULT_MODEL, overrides or [], targets, archs, num_sms)
            num_failed = _compile(plan, archs, jobs or _num_cores())
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    except workers.TerminatedError as error:
        raise typer.Exit(143) from error
    raise typer.Exit(1 if num_failed else 0)


def _compile(plan: Plan, archs: list[str], num_workers: int) -> int:
    """Compile what is planned and print how it went; gives the number of failures."""
    from rich.console import Console

    console = Console(highlight=False)
    for (asked_by, _), error in plan.unsupported.items():
        console.print(f"not served  {asked_by}: {error}", soft_wrap=True, markup=False)
    for line in plan.failures:
        console.print(f"failed    {line}", soft_wrap=True, markup=False)
    counts: Counter[str] = Counter()
    num_jobs = len(plan.jobs)
    try:
        with closing(workers.run(list(plan.jobs.values()), num_workers)) as results:
            _report(results, counts, num_jobs, console)
    finally:
        failed = counts["failed"] + len(plan.failures)
        done = f"{counts['compiled']} compiled, {counts['cached']} cached already, {failed} failed"
        left = num_jobs - counts.total()
        rest = f"; interrupted with {left} left: the same command goes on from here" if left else ""
        console.print(f"{done}, for {', '.join(archs)}{rest}", soft_wrap=True)
    return failed
