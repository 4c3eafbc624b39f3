"""`tk verify`: whether each op was verified on a GPU, and launches the same there now."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tk_core.cli.list import STATE_COLORS
from tk_core.cli.select import select, specs_of

if TYPE_CHECKING:
    from tk_core.ledger import Status

_BAD = "stale", "missing"


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
    """Show on which GPU and when each op was verified, and whether its cases launch the same programs now.

    Needs the cases, which are in a checkout. Exit code 1 if an op's verification is missing or stale (a case launches
    something else since). An op marked pending passes.
    """
    from tk_core import ledger
    from tk_core.testing import launches

    if pending is not None and (targets or as_json):
        raise typer.BadParameter("--pending: expected nothing beside it but the op and why")
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

    compared = launches.compared(list(select(targets or [], specs_of)))
    if as_json:
        statuses = dict(compared)
        rows = [{"op": op, "state": s.state, "reason": s.reason, "entry": s.entry} for op, s in statuses.items()]
        typer.echo(json.dumps(rows, indent=2, default=str))
    else:
        statuses = _printed(compared)
    raise typer.Exit(1 if any(status.state in _BAD for status in statuses.values()) else 0)


def _printed(compared: "Iterator[tuple[str, Status]]") -> "dict[str, Status]":
    """Print a line for each op as soon as it is compared, and then their number."""
    from rich.console import Console
    from rich.text import Text

    from tk_core import ledger

    console = Console(highlight=False)
    statuses = {}
    for op, status in compared:
        statuses[op] = status
        verified = f"{status.entry['gpu']}, {status.entry['date']}" if status.entry and "gpu" in status.entry else None
        line = Text.assemble((f"{status.state:<9}", STATE_COLORS[status.state]), op)
        line.append("".join(f"; {text}" for text in (verified, status.reason, ledger.not_comparable(op)) if text))
        console.print(line, soft_wrap=True)
    num_bad = sum(status.state in _BAD for status in statuses.values())
    console.print(f"{len(statuses)} ops, {num_bad or 'none'} missing or stale")
    return statuses
