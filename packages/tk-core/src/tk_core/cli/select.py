"""Which ops the arguments of a command line select."""

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tk_core.testing import OpSpec


def _is_package(name: str) -> bool:
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
        return False
    return importlib.util.find_spec(f"{name}.testing") is not None


def _built_on(target: str, names: list[str]) -> list[str]:
    """For a package without ops of its own, such as tk_modeling, the tk packages that it requires; else none."""
    from packaging.requirements import Requirement

    from tk_core.testing import load_specs

    if target not in names or load_specs(target):
        return []
    required = {Requirement(text).name.replace("-", "_") for text in metadata.requires(target) or ()}
    return [name for name in names if name in required]


def select(targets: Iterable[str]) -> "dict[str, OpSpec]":
    """Specs of the ops that packages and ops on a command line name, of all ops if it names none.

    A package may be written tk-quant or tk_quant, an op tk_quant.transpose or transpose; one without ops, such as
    tk-modeling, stands for those that it is built on. Raises typer.BadParameter for a name that is neither.
    """
    from tk_core.testing import load_specs

    targets = list(targets)
    if not targets:
        return load_specs()
    return {op: spec for specs in select_each(targets).values() for op, spec in specs.items()}


def select_each(targets: Iterable[str]) -> "dict[str, dict[str, OpSpec]]":
    """The same for each target by itself."""
    from tk_core.testing import load_specs, packages

    names = packages()
    parts = {target: _built_on(name := target.replace("-", "_"), names) or [name] for target in targets}
    named = [part.partition(".")[0] for expanded in parts.values() for part in expanded]
    # A package that is not registered as an entry point can be named, too.
    names += [name for name in dict.fromkeys(named) if name not in names and _is_package(name)]
    # Load only the packages that are named: another one may fail to load.
    needed = [name for name in names if name in named] if set(named) <= set(names) else names
    specs = {op: spec for name in needed for op, spec in load_specs(name).items()}

    def named_by(part: str) -> "dict[str, OpSpec]":
        found = {op: spec for op, spec in specs.items() if part in (op, *op.split(".", 1))}
        if not found:
            others = [name for name in names if name != part]
            near = get_close_matches(part, [*others, *specs, *(op.partition(".")[2] for op in specs)], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{part!r}: expected a package ({', '.join(others)}) or an op of one{hint}")
        return found

    return {
        target: {op: spec for part in expanded for op, spec in named_by(part).items()}
        for target, expanded in parts.items()
    }
