"""Which ops the arguments of a command line select."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tk_core import ledger

if TYPE_CHECKING:
    from tk_core.testing import OpSpec

T = TypeVar("T")
OpsOf = Callable[[str], Mapping[str, T]]
"""From a package to what is known of its ops, by name: `records_of` or `specs_of`."""


def records_of(package: str) -> dict[str, dict[str, Any]]:
    """Records of a package's ops in gpu-verified.json, which has one of each, those that wait for a GPU included."""
    return dict(sorted(ledger.entries(package).items()))


def specs_of(package: str) -> "dict[str, OpSpec]":
    """Specs of a package's ops. Raises typer.BadParameter if the package was installed from a wheel, without tests."""
    from tk_core.testing import load_specs

    try:
        return load_specs(package)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


def select(targets: Iterable[str], ops_of: OpsOf[T]) -> dict[str, T]:
    """The ops that packages and ops on a command line name, all ops if it names none.

    A package may be written tk-quant or tk_quant, an op tk_quant.transpose or transpose; one without ops, such as
    tk-modeling, stands for those that it is built on. Raises typer.BadParameter for a name that is neither.
    """
    from tk_core.testing import packages

    targets = list(targets)
    if not targets:
        return {op: found for name in packages() for op, found in ops_of(name).items()}
    return {op: found for ops in select_each(targets, ops_of).values() for op, found in ops.items()}


def select_each(targets: Iterable[str], ops_of: OpsOf[T]) -> dict[str, dict[str, T]]:
    """The same for each target by itself."""
    from tk_core.testing import packages

    names = packages()
    parts = {target: _built_on(name := target.replace("-", "_"), names, ops_of) or [name] for target in targets}
    named = [part.partition(".")[0] for expanded in parts.values() for part in expanded]
    # A package that is not registered as an entry point can be named, too.
    names += [name for name in dict.fromkeys(named) if name not in names and _is_package(name)]
    # Load only the packages that are named: another one may fail to load.
    needed = [name for name in names if name in named] if set(named) <= set(names) else names
    ops = {op: found for name in needed for op, found in ops_of(name).items()}

    def named_by(part: str) -> dict[str, T]:
        found = {op: of_op for op, of_op in ops.items() if part in (op, *op.split(".", 1))}
        if not found:
            others = [name for name in names if name != part]
            near = get_close_matches(part, [*others, *ops, *(op.partition(".")[2] for op in ops)], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{part!r}: expected a package ({', '.join(others)}) or an op of one{hint}")
        return found

    return {
        target: {op: found for part in expanded for op, found in named_by(part).items()}
        for target, expanded in parts.items()
    }


def _built_on(target: str, names: list[str], ops_of: OpsOf[Any]) -> list[str]:
    """For a package without ops of its own, such as tk_modeling, the tk packages that it requires; else none."""
    from packaging.requirements import Requirement

    if target not in names or ops_of(target):
        return []
    required = {Requirement(text).name.replace("-", "_") for text in metadata.requires(target) or ()}
    return [name for name in names if name in required and ops_of(name)]


def _is_package(name: str) -> bool:
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
        return False
    return importlib.util.find_spec(f"{name}.reference") is not None
