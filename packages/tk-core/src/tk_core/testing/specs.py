"""What tests, benchmarks and the command tk know about an op: its reference and its named cases."""

import importlib
import importlib.util
import pkgutil
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tk_core.testing.numeric import assert_equal
from tk_core.testing.trees import distinct_bytes

Make = Callable[[str], dict[str, Any]]
"""make(device) → an op's keyword arguments, drawn from torch's global generator. Works on device "meta" too."""

Call = Callable[[], Any]
Peer = Callable[..., Call]
"""Takes an op's arguments, and returns a call that computes the same with another library, for benchmarks."""


@dataclass(frozen=True)
class Case:
    """One named input of an op."""

    name: str
    """Unique in the op, kebab-case, such as bf16-h7168-t4001-strided."""
    make: Make
    compile: bool = False
    """Its kernels are compiled for the spec's `archs` in the compile tier: one case for each code path."""
    small: bool = False
    """Small enough for the cpu tier and for compute-sanitizer: a few thousand elements."""
    modes: bool = False
    """Also run on a side stream, under torch.compile and in a CUDA graph."""
    bench: bool = False
    """A benchmark shape."""
    model_shape: bool = False
    """A benchmark shape of a real model: torch.compile is measured too, and the READMEs' tables show the case."""
    gpu: bool = True
    """Runs in the gpu tier; False for a case that only serves benchmarks."""
    archs: tuple[str, ...] | None = None
    """Architectures that the compile tier compiles this case for; None means the spec's."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", self.name):
            raise ValueError(f"name: expected kebab-case such as bf16-h7168-t4001, got {self.name!r}")


def bench_case(name: str, make: Make, **roles: bool) -> Case:
    """A case for benchmarks alone, or for these and the compile tier, with "-bench" after its name."""
    return Case(f"{name}-bench", make, bench=True, gpu=False, **roles)


@dataclass(frozen=True)
class OpSpec:
    """One public op, its reference and its cases."""

    op: Callable[..., Any]
    reference: Callable[..., Any] = None
    """By default the function of the same name in the package's `reference`."""
    cases: tuple[Case, ...] = ()
    compare: Callable[[Any, Any], None] = assert_equal
    """compare(actual, expected) on trees of tensors; raises AssertionError."""
    least_bytes: Callable[[dict[str, Any], Any], int] | None = None
    """(arguments, outputs) → the fewest bytes to move; by default every input and output tensor once."""
    mutates: tuple[str, ...] = ()
    """Arguments that the op writes into (`out`, in-place ones). `compare` then gets (result, *these)."""
    archs: tuple[str, ...] = ("sm_90a", "sm_100a")
    """Architectures that the compile tier compiles the op's kernels for."""

    def __post_init__(self) -> None:
        if self.reference is None:
            package, _, name = self.name.partition(".")
            object.__setattr__(self, "reference", getattr(importlib.import_module(f"{package}.reference"), name))
        twice = [name for name, count in Counter(case.name for case in self.cases).items() if count > 1]
        if twice:
            raise ValueError(f"cases: expected unique names, got {', '.join(twice)} more than once in {self.name}")

    @property
    def name(self) -> str:
        """The op's name, such as "tk_quant.transpose"."""
        return f"{self.op.__module__.partition('.')[0]}.{self.op.__name__}"

    def bytes_of(self, kwargs: dict[str, Any], outputs: Any) -> int:
        """The fewest bytes that a call with these arguments and outputs moves."""
        if self.least_bytes is not None:
            return self.least_bytes(kwargs, outputs)
        return distinct_bytes((kwargs, outputs))


def packages() -> list[str]:
    """Import names of the op packages: those registered as entry points, or if none is, all tk_… on the path."""
    if registered := {entry.value for entry in entry_points(group="tk_core.packages")}:
        return sorted(filter(importlib.util.find_spec, registered))
    return sorted(m.name for m in pkgutil.iter_modules() if m.name.startswith("tk_") and m.name != "tk_core")


def _tests(package: str) -> Path:
    """The folder of a package's tests. Raises FileNotFoundError unless the package is that of a checkout."""
    if (spec := importlib.util.find_spec(package)) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    folder = Path(spec.origin).parents[2] / "tests"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{package}: its cases are in the repository, which needs to be checked out: no {folder}"
        )
    return folder


def load_specs(package: str | None = None) -> dict[str, OpSpec]:
    """Every module-level `OpSpec` of a package's test files, by op name; without a package, of all packages.

    It imports the files that make an OpSpec as pytest does, from the root of the repository, so pytest does not import
    them again. Raises ModuleNotFoundError for a package that is not installed, FileNotFoundError for one that is
    installed from a wheel, which has no tests, ValueError if two specs are for one op.
    """
    if package is None:
        return {name: spec for each in packages() for name, spec in load_specs(each).items()}
    folder = _tests(package)
    from _pytest.pathlib import ImportMode, import_path

    root = folder.parents[2]
    specs: dict[str, OpSpec] = {}
    for file in sorted(folder.rglob("test_*.py")):
        if "OpSpec(" not in file.read_text(encoding="utf-8"):
            continue
        module = import_path(file, mode=ImportMode.importlib, root=root, consider_namespace_packages=False)
        for value in vars(module).values():
            if not isinstance(value, OpSpec) or not value.name.startswith(f"{package}."):
                continue
            if specs.setdefault(value.name, value) is not value:
                raise ValueError(f"{file}: expected one OpSpec for {value.name}, got another")
    return specs
