"""The least amax of a cast, to which a block's amax is raised: the format's, or the caller's sf_clamp_min."""

from typing import Any

from tk_core import check
from tk_quant.lib.quantize import LIMITS

_LEAST_NORMAL = 2.0**-126


def check_sf_clamp_min(value: Any, fmt: str) -> None:
    """Raise unless `value` is None, or a number of float32 with which sf and its reciprocal stay normal."""
    if value is not None:
        check.number("sf_clamp_min", value, at_least=LIMITS[fmt][0] * _LEAST_NORMAL)


def least_amax_of(fmt: str, sf_clamp_min: float | None) -> float:
    """The least amax that a kernel gets as a run-time argument, which rounds it to float32."""
    return LIMITS[fmt][1] if sf_clamp_min is None else float(sf_clamp_min)
