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
    from tk_core.testing import load_specs, packages

    names = packages()
    targets = list(dict.fromkeys(target.replace("-", "_") for target in targets))
    targets = [name for target in targets for name in _built_on(target, names) or [target]]
    named = [target.partition(".")[0] for target in targets]
    # A package that is not registered as an entry point can be named, too.
    names += [name for name in dict.fromkeys(named) if name not in names and _is_package(name)]
    # Load only the packages that are named: another one may fail to load.
    needed = [name for name in names if name in named] if targets and set(named) <= set(names) else names
    specs = {op: spec for name in needed for op, spec in load_specs(name).items()}
    if not targets:
        return specs
    chosen = set()
    for target in targets:
        ops = [op for op in specs if target in (op, op.partition(".")[0], op.partition(".")[2])]
        if not ops and target not in names:
            known = [*names, *specs, *(op.partition(".")[2] for op in specs)]
            near = get_close_matches(target, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{target}: expected a package ({', '.join(names)}) or an op of one{hint}")
        chosen.update(ops)
    return {op: spec for op, spec in specs.items() if op in chosen}
