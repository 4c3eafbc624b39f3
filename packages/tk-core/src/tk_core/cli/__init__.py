"""The command `tk`: check the machine, list ops, compile ahead, carry the cache, see what is verified on a GPU."""

from importlib.metadata import version
from typing import Annotated

import typer

from tk_core.cli.cache import app as _cache_app
from tk_core.cli.doctor import doctor
from tk_core.cli.list import list_ops
from tk_core.cli.verify import verify
from tk_core.cli.warmup import warmup

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)
app.command("doctor")(doctor)
app.command("list")(list_ops)
app.command("warmup")(warmup)
app.command("verify")(verify)
app.add_typer(_cache_app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tk-core {version('tk-core')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command `tk`."""
    app()
