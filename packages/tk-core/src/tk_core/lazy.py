"""Packages whose public names are imported only when they are first used."""

import ast
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    _lazy_exports: Mapping[str, str | None]
    """Name → the submodule that has it; None for a name that is itself a submodule."""
    _lazy_public: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        exports = self.__dict__.get("_lazy_exports", {})
        if name == "__version__" and "." not in self.__name__:
            self.__dict__[name] = importlib.metadata.version(self.__name__.replace("_", "-"))
            return self.__dict__[name]
        if name not in exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{self.__name__}.{exports[name] or name}")
        value = module if exports[name] is None else getattr(module, name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # An op and its file share a name; importing the file must not hide the op behind the submodule.
        if isinstance(value, ModuleType) and self._lazy_exports.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        dunders = {name for name in self.__dict__ if name.startswith("__") and name.endswith("__")}
        return sorted(dunders | self._lazy_public)


def export_stub(package: str, init: str) -> None:
    """Import the names in a package's stub, __init__.pyi beside the file `init`, when each is first used (PEP 562).

    Type checkers read the same stub, so it is the only table of public names, which `dir` shows: `from .submodule
    import x as x`, and for a submodule itself `from . import x as x`. `__all__` has the former only. A name imported
    without `as` exists, but is not public: neither `dir` nor `__all__` has it, and type checkers do not export it.
    `__version__` of a top-level package is the version of the installed distribution with its name.
    """
    module = sys.modules[package]
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = [(alias, node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    module.__dict__["_lazy_exports"] = {alias.name: submodule for alias, submodule in names}
    module.__dict__["__all__"] = sorted(alias.asname for alias, submodule in names if alias.asname and submodule)
    version = {"__version__"} if "." not in package else set()
    module.__dict__["_lazy_public"] = frozenset({alias.asname for alias, _ in names if alias.asname} | version)
    module.__class__ = _LazyPackage
