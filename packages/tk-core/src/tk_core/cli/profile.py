"""Profiles of models: a TOML file of sizes and formats, from which each package derives the ops that a model calls.

A section such as [tk_moe] has the fields of `tk_moe.warmup.Profile`. Values above the sections go to every section with
a field of that name. See docs/warmup.md.
"""

import inspect
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import torch

Call = tuple[Any, dict[str, Any]]
"""An op and its arguments, tensors on the meta device."""

_SHIPPED = files("tk_core.cli") / "profiles"

signature = cache(inspect.signature)
"""`inspect.signature`, once for each op: anew for each call it would take most of a plan's time."""


def empty(*shape: int, dtype: "torch.dtype | str" = "float32") -> "torch.Tensor":
    """A tensor on the meta device, for the arguments of a call; `dtype` may be a name such as "bfloat16"."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device="meta")


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    """The call op(*args, **kwargs), all its arguments by name."""
    # Not by `Signature.bind`, which would take half of a plan's time; the op itself refuses what it does not take.
    return op, dict(zip(_names(op)[: len(args)], args, strict=True), **kwargs)


@cache
def _names(op: Any) -> tuple[str, ...]:
    return tuple(signature(op).parameters)


class ProfileError(ValueError):
    """A profile or one of its values is invalid."""


@dataclass(frozen=True)
class ModelProfile:
    """A model's sections, each an instance of its package's `Profile`."""

    max_tokens: int
    """Tokens of the largest batch."""
    sections: dict[str, Any]

    def calls(
        self, num_tokens: int, packages: Collection[str] | None = None
    ) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Name of each op that a batch of `num_tokens` tokens calls, the op, and arguments on the meta device.

        `packages` are those whose ops are wanted; None means all.
        """
        for package, section in self.sections.items():
            if packages is None or package in packages:
                for op, arguments in import_module(f"{package}.warmup").calls(section, num_tokens):
                    yield f"{package}.{op.__name__}", op, arguments


def shipped() -> list[str]:
    """Names of the profiles that come with tk-core."""
    return sorted(file.name.removesuffix(".toml") for file in _SHIPPED.iterdir() if file.name.endswith(".toml"))


def load(model: str, overrides: Sequence[str] = ()) -> ModelProfile:
    """Load the shipped profile of this name, or the file at this path, with overrides such as "num_experts=128".

    An override's value is parsed as TOML, or else kept as text. Its key may name a section, as tk_moe.num_experts does.
    Sections of packages that are not installed are left out. Raises ProfileError.
    """
    raw = _read(model)
    for text in overrides:
        _override(raw, text)
    tables = {key: value for key, value in raw.items() if isinstance(value, dict)}
    shared = {key: value for key, value in raw.items() if key not in tables}
    max_tokens = _converted(shared.pop("max_tokens", None), int, "max_tokens")
    if not 1 <= max_tokens < 1 << 31:
        raise ProfileError(f"max_tokens: expected at least 1 and less than 2**31, got {max_tokens}")
    classes = {package: import_module(f"{package}.warmup").Profile for package in tables if find_spec(package)}
    taken = {field.name for cls in classes.values() for field in fields(cls)}
    if len(classes) == len(tables):
        _refuse_unknown(shared, taken | {"max_tokens"}, "")
    sections = {}
    for package, cls in classes.items():
        names = {field.name for field in fields(cls)}
        values = {key: value for key, value in shared.items() if key in names} | tables[package]
        sections[package] = _converted(values, cls, package)
    return ModelProfile(max_tokens, sections)


def _read(model: str) -> dict[str, Any]:
    file = _SHIPPED / f"{model}.toml" if model in shipped() else Path(model)
    if not file.is_file():
        raise ProfileError(f"model: expected {', '.join(shipped())} or the path of a TOML file, got {model}")
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{model}: {error}") from error
    unknown = [key for key, value in raw.items() if isinstance(value, dict) and not _is_section(key)]
    if unknown:
        raise ProfileError(f"{model}: expected sections of packages such as tk_moe, got {', '.join(unknown)}")
    return raw


def _is_section(name: str) -> bool:
    return name.startswith("tk_") and (find_spec(name) is None or find_spec(f"{name}.warmup") is not None)


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, _, name = key.strip().rpartition(".")
    if not equals or not name or (section and section not in raw):
        sections = ", ".join(key for key, value in raw.items() if isinstance(value, dict))
        raise ProfileError(f"set: expected KEY=VALUE or SECTION.KEY=VALUE with a section of {sections}, got {text}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    if section:
        raw[section][name] = parsed
        return
    # A section's value takes precedence over the one above all sections, so replace both.
    holders = [table for table in raw.values() if isinstance(table, dict) and name in table]
    for table in holders:
        table[name] = parsed
    raw[name] = parsed


def _refuse_unknown(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ProfileError(f"{where}{name}: no such value{f'; did you mean {near[0]}?' if near else ''}")


def _converted(value: Any, hint: Any, where: str) -> Any:
    """Check a TOML value against a field's annotation, and convert it: a list to a tuple, a table to a dataclass."""
    if is_dataclass(hint):
        return _instance(value, hint, where)
    if get_origin(hint) is tuple:
        return _tuple(value, get_args(hint), where)
    allowed = get_args(hint) if get_origin(hint) is Literal else None
    # Compare types exactly: in Python a bool is also an int.
    if (value in allowed and type(value) in map(type, allowed)) if allowed else type(value) is hint:
        return value
    expected = f"one of {', '.join(map(repr, allowed))}" if allowed else f"a value of type {hint.__name__}"
    raise ProfileError(f"{where}: expected {expected}, got {value!r}")


def _tuple(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: expected a list, got {value!r}")
    each = [hints[0]] * len(value) if hints[-1] is Ellipsis else list(hints)
    if len(each) != len(value):
        raise ProfileError(f"{where}: expected {len(each)} values, got {value!r}")
    return tuple(_converted(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(zip(value, each)))


def _instance(value: Any, cls: type, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: expected a table, got {value!r}")
    hints = get_type_hints(cls)
    _refuse_unknown(value, set(hints), f"{where}.")
    for field in fields(cls):
        if field.name not in value and field.default is MISSING:
            raise ProfileError(f"{where}.{field.name}: expected a value, got none")
    return cls(**{name: _converted(item, hints[name], f"{where}.{name}") for name, item in value.items()})
