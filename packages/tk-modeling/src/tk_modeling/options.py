"""Checks of constructors' options that several modules have."""

from typing import Any

import torch

from tk_core import check
from tk_ep import ElasticBuffer

_DTYPES = (torch.bfloat16, torch.float32)


def check_placement(device: Any, dtype: Any = None) -> None:
    """Raise TypeError or ValueError unless parameters can be on this device and, for the kernels, of this dtype.

    None stands for torch's default, which is not checked: a module made under it may be cast later.
    """
    is_device = device is None or isinstance(device, str | int | torch.device)
    check.require_type(is_device, "device", "a torch.device, its name or None", device)
    try:
        torch.device(device or "cpu")
    except RuntimeError:
        raise ValueError(f"device: expected a torch.device, its name or None, got {device!r}") from None
    check.require_type(dtype is None or isinstance(dtype, torch.dtype), "dtype", "a torch.dtype or None", dtype)
    check.require(dtype is None or dtype in _DTYPES, "dtype", "torch.bfloat16, torch.float32 or None", dtype)


def check_numbers(**numbers: Any) -> None:
    """Raise TypeError or ValueError unless all are finite in float32 and at least 0."""
    for name, value in numbers.items():
        check.number(name, value, at_least=0)


def check_flags(**flags: Any) -> None:
    """Raise TypeError unless all are bools."""
    for name, value in flags.items():
        check.flag(name, value)


def check_ep(ep: Any) -> None:
    """Raise TypeError unless it is a buffer or None."""
    check.require_type(ep is None or isinstance(ep, ElasticBuffer), "ep", "a tk_ep.ElasticBuffer or None", ep)
