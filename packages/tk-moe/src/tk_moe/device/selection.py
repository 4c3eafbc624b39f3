"""A step of the selection by packed keys; see tk_moe.lib.packed_selection."""

from typing import Any

from tk_core.headers import Header

_SELECTION = Header(__file__)


def take_best(best: Any, top: Any) -> Any:
    """Where the first of the four sorted int32 at `best` is `top`, drop it and move up the others."""
    return _SELECTION.call("void", "tk_take_best", best, top)
