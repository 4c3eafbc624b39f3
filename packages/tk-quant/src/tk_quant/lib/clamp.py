"""The range of swiglu_clamp_value, the same in all SwiGLU ops."""

import math
from typing import Any

from tk_core import check

_LEAST_NORMAL = 2.0**-126


def check_clamp_value(value: Any) -> None:
    """Raise unless `value` is None, a positive normal float32, or infinity, which clamps nothing."""
    if value is not None and not (isinstance(value, float) and value == math.inf):
        check.number("swiglu_clamp_value", value, at_least=_LEAST_NORMAL)
