"""The flat operator of an op: torch's schemas know no pairs, no choice of types and no number of results that varies.

An op's arguments reach torch one by one, those of a pair as two, followed by the list of the results to write. All of
it is read off the op's signature, so that nobody writes it down a second time.
"""

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

_SCALARS = {bool: "bool", int: "SymInt", float: "float", str: "str", torch.dtype: "ScalarType"}


class _Parameter(NamedTuple):
    """How one parameter reaches torch: as `kind`, in arguments of these torch types."""

    kind: Literal["as it is", "list", "tuple", "name", "pair", "open pair", "tensor or else"]
    types: tuple[str, ...]


def _parameter(annotation: Any) -> _Parameter:
    choices = set(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else {annotation}
    optional = "?" if types.NoneType in choices else ""
    choices.discard(types.NoneType)
    origins = {get_origin(choice) or choice for choice in choices}
    if any(get_args(choice) == (Tensor, Tensor) for choice in choices):
        return _Parameter("pair", ("Tensor" + optional, "Tensor?"))
    if choices == {tuple[Tensor, Tensor | None]}:
        return _Parameter("open pair", ("Tensor", "Tensor?"))
    if Tensor in choices and (list in origins or int in choices):
        return _Parameter("tensor or else", ("Tensor?", "SymInt[]?" if list in origins else "SymInt?"))
    if any(isinstance(choice, type) and issubclass(choice, enum.Enum) for choice in choices):
        return _Parameter("name", ("str" + optional,))
    (choice,) = choices
    if choice is Tensor:
        return _Parameter("as it is", ("Tensor" + optional,))
    if choice in _SCALARS:
        return _Parameter("as it is", (_SCALARS[choice] + optional,))
    items = set(get_args(choice)) - {Ellipsis}
    if items == {Tensor}:
        return _Parameter("list", ("Tensor[]" + optional,))
    if items == {int}:
        return _Parameter("tuple", ("SymInt[]" + optional,))
    raise TypeError(f"{annotation}: torch's operators have no such argument")


def _flatten(kind: str, value: Any) -> tuple[Any, ...]:
    if kind == "open pair":
        return tuple(value)
    if kind == "pair":
        return tuple(value) if isinstance(value, tuple | list) else (value, None)
    if kind == "tensor or else":
        if isinstance(value, Tensor):
            return value, None
        return None, list(value) if isinstance(value, (list, tuple)) else value
    if kind == "name":
        return (None if value is None else str(value),)
    return (list(value) if kind in ("list", "tuple") and value is not None else value,)


def _unflatten(kind: str, flat: Iterator[Any]) -> Any:
    value = next(flat)
    if kind == "open pair":
        return value, next(flat)
    if kind == "pair":
        second = next(flat)
        return value if second is None else (value, second)
    if kind == "tensor or else":
        second = next(flat)
        return second if value is None else value
    return tuple(value) if kind == "tuple" and value is not None else value


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, those in lists and tuples too, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value)
    return found


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first of these tensors, if there is any."""
    for value in values:
        found = first_tensor(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Tensor):
            return found
    return None


class FlatOperator:
    """An op's operator in torch.ops, which writes the op's results into tensors that it is given."""

    def __init__(
        self,
        library: torch.library.Library,
        function: Callable[..., Any],
        name: str,
        written: Sequence[str],
    ) -> None:
        hints = get_type_hints(function)
        hints.pop("return", None)
        self.kinds = []
        declared = []
        for parameter, annotation in hints.items():
            kind, torch_types = _parameter(annotation)
            self.kinds.append(kind)
            for index, torch_type in enumerate(torch_types):
                mark = f"Tensor(a{len(declared)}!)" if parameter in written else "Tensor"
                flat_name = parameter if len(torch_types) == 1 else f"{parameter}_{index}"
                declared.append(f"{torch_type.replace('Tensor', mark)} {flat_name}")
        # Layouts must reach kernels as they are.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        library.define(f"{name}({', '.join(declared)}, Tensor(results!)[] results) -> ()", tags=tags)
        library.impl(name, lambda *_: None, "Meta")
        self.overload = getattr(getattr(torch.ops, library.ns), name).default

    def __call__(self, call: Sequence[Any], results: list[Tensor]) -> None:
        """Call the operator with an op's arguments, in the order of its parameters, and the results to write."""
        flat = [x for kind, value in zip(self.kinds, call) for x in _flatten(kind, value)]
        self.overload(*flat, results)

    def arguments(self, flat: Sequence[Any]) -> list[Any]:
        """The op's arguments, made again from the operator's."""
        values = iter(flat)
        return [_unflatten(kind, values) for kind in self.kinds]
