"""`tk list`: the ops of the installed packages."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tk_core.cli.select import select

if TYPE_CHECKING:
    from tk_core.testing import OpSpec

STATE_COLORS = {"verified": "green", "pending": "yellow", "stale": "red", "missing": "red"}


def archs_of(spec: "OpSpec") -> list[str]:
    """Architectures that an op has kernels for: those on which some case does not raise UnsupportedArchError.

    It tries the compile tier's cases with `archs` of their own, and the first case without.
    """
    from tk_core.arch import ARCHS, UnsupportedArchError
    from tk_core.kernel import capture

    cases = [case for case in spec.cases if case.compile]
    tried = [case for case in cases if case.archs] + [case for case in cases if not case.archs][:1]
    served = []
    for arch in ARCHS.values():
        for case in tried:
            with capture(arch), suppress(UnsupportedArchError):
                spec.op(**case.make("meta"))
                served.append(arch.name)
                break
    return served


def describe(op: str, spec: "OpSpec") -> dict[str, Any]:
    """What `tk list --json` says about one op."""
    from tk_core import ledger

    status = ledger.status(op)
    return {
        "op": op,
        "archs": archs_of(spec),
        "cases": [case.name for case in spec.cases],
        "state": status.state,
        "reason": status.reason,
        "entry": status.entry,
    }


def _archs_text(names: list[str]) -> str:
    from tk_core.arch import ARCHS

    newest = list(ARCHS)[-len(names) :] if names else []
    return f"{names[0]} and newer" if names == newest else " ".join(names)


def list_ops(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, case names included.")] = False,
) -> None:
    """List ops, the architectures they serve, their cases and whether they are verified on a GPU."""
    rows = [describe(op, spec) for op, spec in select(targets or []).items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("op", "architectures", "cases", "on a GPU"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        state = Text(row["state"], STATE_COLORS.get(row["state"], ""))
        table.add_row(row["op"], _archs_text(row["archs"]), str(len(row["cases"])), state)
    # Names must not be cut, however narrow the terminal is.
    Console(highlight=False, width=max(Console().width, 120)).print(table)
