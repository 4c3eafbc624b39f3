"""Scores of one logit or of several; `function` is "sigmoid" or "sqrtsoftplus"."""

from typing import Any

from tk_core.headers import Header, builtin

_SCORING = Header(__file__)


def score(function: str, x: Any) -> Any:
    """The score of a float32."""
    return _SCORING.call("float32", f"tk_score_{function}", x)


def store_scores(function: str, x: Any, scores: Any, count: int) -> Any:
    """Store the scores of `count` float32 at an address; their instructions overlap where all are within ±64."""
    return _SCORING.call("void", f"tk_scores_{function}<{count}>", x, scores)


def fast_sigmoid(x: Any) -> Any:
    """The sigmoid by the fast exponential and reciprocal."""
    return _SCORING.call("float32", "tk_fast_sigmoid", x)


def fast_reciprocal(x: Any) -> Any:
    """The reciprocal of a float32, approximately; a subnormal counts as 0."""
    return _SCORING.call("float32", "tk_fast_reciprocal", x)


def exp(x: Any) -> Any:
    """CUDA's accurate exponential of a float32."""
    return builtin("float32", "expf", x)
