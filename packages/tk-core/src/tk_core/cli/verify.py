"""`tk verify`: whether each op was verified on a GPU with its present source."""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer

from tk_core.cli.list import STATE_COLORS
from tk_core.cli.select import select, specs_of

# Records are made on sm_90, so its kernels are what has to be the same.
_ARCH = "sm_90a"


def _fingerprints(sources: Path, hashed: str, ops: Sequence[str]) -> dict[str, Any]:
    """What tk_core.testing.fingerprints prints of the packages below a folder; `hashed`: programs or machine-code."""
    from tk_core.testing import fingerprints

    paths = ":".join(str(folder) for folder in sorted(sources.glob("packages/*/src")))
    command = ["env", f"PYTHONPATH={paths}", sys.executable, "-P", fingerprints.__file__, _ARCH, hashed, *ops]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise typer.BadParameter(f"--unchanged: the ops of {sources} could not be read, see above")
    return json.loads(ran.stdout)


def _git(*arguments: str, cwd: Path = Path(__file__).parent) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True).stdout
    except FileNotFoundError as error:
        raise typer.BadParameter("--unchanged: needs git") from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise typer.BadParameter(f"--unchanged: expected a commit of the repository that has {cwd}: {why}") from error


def changes(commit: str, ops: Sequence[str]) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """For each op, why its record of `commit` can't be kept (None if it can), and that record."""
    if not ops:
        return {}
    root = Path(_git("rev-parse", "--show-toplevel").decode().strip())
    with tempfile.TemporaryDirectory() as folder:
        packed = _git("archive", commit, "packages", cwd=root)
        with tarfile.open(fileobj=BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")

        def compared(hashed: str, ops: Sequence[str]) -> dict[str, tuple[str | None, dict[str, Any]]]:
            with ThreadPoolExecutor() as pool:  # minutes of processor time each
                before, now = pool.map(lambda sources: _fingerprints(sources, hashed, ops), (Path(folder), root))
            return {op: (why_changed(before[op], now[op]), before[op]["entry"]) for op in ops}

        found = compared("programs", ops)
        # A different program may compile to the same instructions: CUDA text in another order, or with other names.
        return found | compared("machine-code", [op for op, (why, _) in found.items() if why])


def why_changed(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Why a record does not hold for an op's sources of today; None if it does."""
    if before["state"] != "verified":
        return f"its record was {before['state']} at that commit"
    gone = before["cases"].keys() - now["cases"].keys()
    new = now["cases"].keys() - before["cases"].keys()
    other = [case for case, digest in before["cases"].items() if now["cases"].get(case, digest) != digest]
    parts = {"without case": sorted(gone), "with new case": sorted(new), "other kernels or launches in": other}
    return "; ".join(f"{what} {', '.join(cases[:3])}" for what, cases in parts.items() if cases) or None


def _renew(op: str, commit: str, change: tuple[str | None, dict[str, Any]]) -> bool:
    from tk_core import ledger

    why, entry = change
    if why is None:
        ledger.record(op, {"unchanged_since": commit, **entry})
    typer.echo(f"{op}: {f'as at {commit}, renewed' if why is None else why}")
    return why is None


def verify(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    pending: Annotated[
        tuple[str, str] | None,
        typer.Option("--pending", metavar="OP WHY", help="Record that an op waits for its verification, and why."),
    ] = None,
    unchanged: Annotated[
        str | None,
        typer.Option(
            "--unchanged",
            metavar="COMMIT",
            help="Renew records of that commit for ops whose kernels and launches are the same now, case by case.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the GPU verification of each op as its ledger has it.

    Exit code 1 if an op's verification is missing or stale (its source changed since). An op marked pending passes.
    """
    from tk_core import ledger

    if pending is not None and (targets or unchanged is not None or as_json):
        raise typer.BadParameter("--pending: expected nothing beside it but the op and why")
    if unchanged is not None and as_json:
        raise typer.BadParameter("--unchanged: expected no --json beside it")
    if pending is not None:
        name, why = pending
        if not why.strip():
            raise typer.BadParameter("--pending: expected a reason, got an empty one")
        chosen = list(select([name], specs_of))
        if len(chosen) != 1:
            raise typer.BadParameter(f"--pending: expected one op, got {name} ({len(chosen)} ops)")
        ledger.mark_pending(chosen[0], why.strip())
        typer.echo(f"{chosen[0]} pending: {why.strip()}")
        return

    if unchanged is not None:
        unchanged = _git("rev-parse", "--short", "--verify", f"{unchanged}^{{commit}}").decode().strip()
        stale = [op for op in select(targets or [], specs_of) if ledger.status(op).state != "verified"]
        kept = [_renew(op, unchanged, why) for op, why in changes(unchanged, stale).items()]
        raise typer.Exit(0 if all(kept) else 1)

    statuses = {op: ledger.status(op) for op in select(targets or [], specs_of)}
    bad = [op for op, status in statuses.items() if status.state in ("stale", "missing")]
    if as_json:
        rows = [{"op": op, "state": s.state, "reason": s.reason, "entry": s.entry} for op, s in statuses.items()]
        typer.echo(json.dumps(rows, indent=2, default=str))
        raise typer.Exit(1 if bad else 0)

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = max(map(len, statuses), default=0)
    for op, status in statuses.items():
        line = Text.assemble((f"{status.state:<9}", STATE_COLORS.get(status.state, "")), f"{op:<{width}}")
        if status.reason:
            line.append(f"  {status.reason}")
        console.print(line, soft_wrap=True)
    total = len(statuses)
    console.print(f"{total} ops, {len(bad)} missing or stale" if bad else f"{total} ops, none missing or stale")
    raise typer.Exit(1 if bad else 0)
