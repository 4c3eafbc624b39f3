"""`tk list`: the ops of the installed packages."""

import importlib
import inspect
import json
from typing import Annotated, Any

import typer

from tk_core.cli.select import records_of, select

STATE_COLORS = {"verified": "green", "pending": "yellow", "stale": "red", "missing": "red"}


def describe(op: str) -> dict[str, Any]:
    """What `tk list --json` says about one op."""
    from tk_core import ledger

    package, _, name = op.partition(".")
    function = getattr(importlib.import_module(package), name)
    status = ledger.status(op)
    return {
        "op": op,
        "what": (inspect.getdoc(function) or "").partition("\n")[0],
        "signature": f"{name}{inspect.signature(function)}",
        "reference": f"{package}.reference.{name}",
        # A function that calls ops, and is none, serves every GPU.
        "min_sm": function.op.min_sm if hasattr(function, "op") else 80,
        "state": status.state,
        "reason": status.reason,
        "entry": status.entry,
    }


def list_ops(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE|OP]...", help="Packages or ops; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, signatures included.")] = False,
) -> None:
    """List ops, from which GPU on each has kernels, whether it is verified on one, and what it computes."""
    rows = [describe(op) for op in select(targets or [], records_of)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("op", "from", "on a GPU", "what"):
        table.add_column(column, no_wrap=column != "what")
    for row in rows:
        state = Text(row["state"], STATE_COLORS.get(row["state"], ""))
        table.add_row(row["op"], f"sm_{row['min_sm']}", state, Text(row["what"]))
    # Names must not be cut, however narrow the terminal is.
    Console(highlight=False, width=max(Console().width, 120)).print(table)
