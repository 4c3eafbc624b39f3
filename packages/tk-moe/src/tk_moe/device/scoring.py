"""Exponentials and reciprocals of logits."""

from typing import Any

from tk_core.headers import Header, builtin

_SCORING = Header(__file__)


def fast_sigmoid(x: Any) -> Any:
    """The sigmoid by the fast exponential and reciprocal."""
    return _SCORING.call("float32", "tk_fast_sigmoid", x)


def fast_reciprocal(x: Any) -> Any:
    """The reciprocal of a float32, approximately; a subnormal counts as 0."""
    return _SCORING.call("float32", "tk_fast_reciprocal", x)


def exp(x: Any) -> Any:
    """CUDA's accurate exponential of a float32."""
    return builtin("float32", "expf", x)
