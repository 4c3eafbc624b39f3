"""The command `tk`: check the machine, list ops, compile ahead, carry the cache, see what is verified on a GPU."""

from importlib.metadata import version
from typing import Annotated

import typer

from tk_core.cli import cache, doctor, verify, warmup
from tk_core.cli import list as list_module

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command("doctor")(doctor.doctor)
app.command("list")(list_module.list_ops)
app.command("warmup")(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command("verify")(verify.verify)


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
