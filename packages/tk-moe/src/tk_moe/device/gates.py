"""Exponentials, sigmoids and reciprocals, and a step of the selection by packed keys."""

from typing import Any

from tk_core.headers import Header, builtin

_GATES = Header(__file__)


def fast_sigmoid(x: Any) -> Any:
    """The sigmoid by approximate exponential and reciprocal: absolute error at most 2e-7, relative error 4e-6."""
    return _GATES.call("float32", "tk_fast_sigmoid", x)


def fast_reciprocal(x: Any) -> Any:
    """The reciprocal of a float32, approximately; a subnormal counts as 0."""
    return _GATES.call("float32", "tk_fast_reciprocal", x)


def exp(x: Any) -> Any:
    """CUDA's accurate exponential of a float32."""
    return builtin("float32", "expf", x)


def take_best(best: Any, top: Any) -> Any:
    """If the first of the four sorted int32 keys at `best` is `top`, drop it and move the other three up."""
    return _GATES.call("void", "tk_take_best", best, top)
