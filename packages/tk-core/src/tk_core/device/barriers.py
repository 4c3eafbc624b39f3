"""Barriers asked without waiting, which TileLang has no call for."""

import tilelang.language as T

from tk_core.headers import Header

_BARRIERS = Header(__file__)


def is_over(barrier: T.PrimExpr, parity: T.PrimExpr) -> T.PrimExpr:
    """1 if the phase of this parity is over, else 0."""
    return _BARRIERS.call("int32", "tk_is_over", barrier, parity)
