"""`tk verify`: whether each op is verified on a GPU as its source stands."""

import json
from typing import Annotated

import typer

from tk_core.cli.list import STATE_COLORS
from tk_core.cli.select import select


def verify(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    pending: Annotated[
        tuple[str, str] | None,
        typer.Option("--pending", metavar="OP WHY", help="Record that an op waits for its verification, and why."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the GPU verification of each op as its ledger has it.

    Exit code 1 if an op's verification is missing or stale (its source changed since). An op marked pending passes.
    """
    from tk_core import ledger

    if pending is not None:
        name, why = pending
        if not why.strip():
            raise typer.BadParameter("--pending: expected a reason, got an empty one")
        chosen = list(select([name]))
        if len(chosen) != 1:
            raise typer.BadParameter(f"--pending: expected one op, got {name} ({len(chosen)} ops)")
        ledger.mark_pending(chosen[0], why.strip())
        typer.echo(f"{chosen[0]} pending: {why.strip()}")
        return

    statuses = {op: ledger.status(op) for op in select(targets or [])}
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
