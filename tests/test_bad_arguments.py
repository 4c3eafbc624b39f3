"""Every op refuses bad arguments of many kinds with a TypeError or ValueError that names an argument."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tk_core.testing import OpSpec, load_specs
from tk_core.testing.trees import transfer

SPECS = load_specs()
# Integers of which any positive one will do: more splits or rows than there are count as all.
UNBOUNDED = {"n_splits", "expected_m", "expected_m_for_psum_layout"}


def wrong_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Tensors that differ from x in one respect, and values that are no tensors."""
    yield "complex", torch.zeros(x.shape, dtype=torch.complex64)
    yield "float16", torch.zeros(x.shape, dtype=torch.float16)
    yield "four more dimensions", x.unsqueeze(0).unsqueeze(0).unsqueeze(0).unsqueeze(0)
    yield "on the meta device", torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    yield "list", [1, 2]
    yield "number", 3
    for dim in range(x.dim()):
        shape = [size + (i == dim) for i, size in enumerate(x.shape)]
        yield f"one longer in dimension {dim}", torch.zeros(shape, dtype=torch.uint8).to(x.dtype)
        if x.shape[dim]:
            yield f"one shorter in dimension {dim}", x.narrow(dim, 0, x.shape[dim] - 1).clone()
    if x.dim() and x.shape[-1] > 1:
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=torch.uint8).to(x.dtype)
        yield "every other channel", wide[..., ::2]


def wrong_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of a wrong type or range in place of a value that is no tensor."""
    if isinstance(value, bool):
        yield from ((repr(wrong), wrong) for wrong in (0, 1, 2.0, "yes", [True], None))
    elif isinstance(value, int):
        yield from (
            (repr(wrong), wrong) for wrong in (float(value), True, -1, -(2**70), 2**31, 2**70, "1", [value], 1j)
        )
    elif isinstance(value, float):
        yield from ((repr(wrong), wrong) for wrong in (math.nan, math.inf, True, "1", [value], 1j))
        yield "10**400", 10**400
    elif isinstance(value, str):
        yield from ((repr(wrong), wrong) for wrong in ("none such", [value], 3, b"e4m3"))
    elif isinstance(value, torch.dtype):
        yield from ((repr(wrong), wrong) for wrong in (torch.complex64, "int64", int, None))
    elif isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        floats = tuple(map(float, value))
        others = (value[0], (0, 0), (-1, 32), (32.0, 32), (32,), "32", (1, 2, 3), floats)
        yield from ((repr(wrong), wrong) for wrong in others)


def wrong_arguments(spec: OpSpec, kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(argument, what is wrong with it, wrong value)."""
    for name, parameter in inspect.signature(spec.op).parameters.items():
        value = kwargs.get(name, parameter.default)
        if value is parameter.empty:
            continue
        if isinstance(value, Tensor):
            yield from ((name, what, wrong) for what, wrong in wrong_tensors(value))
            if "None" not in str(parameter.annotation):
                yield name, "None", None
        elif value is None:
            yield from ((name, repr(wrong), wrong) for wrong in ("none such", 1j, [object()]))
            if "int" in str(parameter.annotation) and "tuple" not in str(parameter.annotation):
                yield from ((name, what, wrong) for what, wrong in wrong_values(1))
        else:
            yield from ((name, what, wrong) for what, wrong in wrong_values(value))


def must_be_refused(name: str, value: Any, wrong: Any) -> bool:
    """Whether a wrong value can never be valid; some others may be, such as another number."""
    if isinstance(wrong, str) or (isinstance(wrong, tuple) and any(isinstance(item, float) for item in wrong)):
        return True
    if type(wrong) is int and wrong == 2**31:
        return name not in UNBOUNDED
    if isinstance(value, Tensor):
        return not isinstance(wrong, Tensor) or wrong.is_complex()
    return type(wrong) is not type(value) if isinstance(value, bool | int | str) else isinstance(wrong, complex)


def says_which(error: Exception, spec: OpSpec) -> bool:
    """Whether an error is one that our checks raise, and names an argument of the op."""
    subject = str(error).partition(":")[0]
    names = inspect.signature(spec.op).parameters
    return type(error) in (TypeError, ValueError) and ":" in str(error) and any(name in subject for name in names)


@pytest.mark.parametrize("name", SPECS)
def test_bad_arguments(name: str) -> None:
    spec = SPECS[name]
    case = next(case for case in spec.cases if case.small)
    torch.manual_seed(0)
    kwargs = case.make("cpu")
    problems = []
    for argument, what, wrong in wrong_arguments(spec, kwargs):
        value = kwargs.get(argument, inspect.signature(spec.op).parameters[argument].default)
        try:
            spec.op(**{**transfer(kwargs), argument: wrong})
        except Exception as error:
            if not says_which(error, spec):
                problems.append(f"{argument} = {what}: {type(error).__name__}: {str(error)[:150]}")
        else:
            if must_be_refused(argument, value, wrong):
                problems.append(f"{argument} = {what}: accepted")
    assert not problems, "\n".join(problems)
