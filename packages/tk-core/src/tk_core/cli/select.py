"""Which packages there are and which ops a command line means."""

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tk_core.testing import OpSpec

# What there may be when running from source without installed metadata.
_FALLBACK = ("tk_quant", "tk_moe", "tk_engram", "tk_mhc", "tk_modeling")


def packages() -> list[str]:
    """Import names of the installed op packages."""
    found = sorted({entry.value for entry in entry_points(group="tk_core.packages")})
    return [name for name in found or _FALLBACK if importlib.util.find_spec(name)]


def _has_testing(package: str) -> bool:
    if not package.isidentifier() or importlib.util.find_spec(package) is None:
        return False
    return importlib.util.find_spec(f"{package}.testing") is not None


def specs_of(package: str) -> "dict[str, OpSpec]":
    """Specs of a package's ops, by "package.op"; none for a package without ops yet."""
    from tk_core.testing import load_specs

    return load_specs(package) if _has_testing(package) else {}


def select(targets: Iterable[str]) -> "dict[str, OpSpec]":
    """Specs of the ops that packages and ops on a command line name, of all ops if it names none.

    A package may be written tk-quant or tk_quant, an op tk_quant.transpose or transpose. Raises typer.BadParameter for
    a name that is neither.
    """
    targets = list(dict.fromkeys(target.replace("-", "_") for target in targets))
    names = packages()
    # A package that nobody registered can still be named.
    for target in targets:
        package = target.partition(".")[0]
        if package not in names and _has_testing(package):
            names.append(package)
    specs = {op: spec for name in names for op, spec in specs_of(name).items()}
    if not targets:
        return specs
    chosen: dict[str, OpSpec] = {}
    for target in targets:
        ops = [op for op in specs if target in (op, op.partition(".")[0], op.partition(".")[2])]
        if not ops and target not in names:
            known = [*names, *specs, *(op.partition(".")[2] for op in specs)]
            near = get_close_matches(target, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{target}: expected a package ({', '.join(names)}) or an op of one{hint}")
        chosen.update((op, specs[op]) for op in ops)
    return {op: specs[op] for op in specs if op in chosen}
