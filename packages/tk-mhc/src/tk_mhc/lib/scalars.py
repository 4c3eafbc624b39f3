"""Arguments that are plain numbers."""

import math
from typing import Any

import torch

from tk_core import check


def check_number(name: str, value: Any, *, at_least: float | None = None) -> None:
    """Raise TypeError unless `value` is an int or a float, ValueError unless it is finite and in range."""
    is_number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    check.require_type(is_number, name, "a number", value)
    check.require(-math.inf < value < math.inf, name, "a finite number", value)
    if at_least is not None:
        check.require(value >= at_least, name, f"at least {at_least}", value)
