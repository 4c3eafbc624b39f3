"""How many SMs (multiprocessors) a kernel with a persistent grid may fill, so that other kernels can run beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from tk_core.arch import get_arch

_limit: int | None = None


@cache
def _cuda_device_num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def get_device_num_sms(device: torch.device | str | int | None = None) -> int:
    """Number of SMs of a CUDA device, the current one by default."""
    if device is None or isinstance(device, (str, int)):
        device = torch.device("cuda" if device is None else device)
    if device.type == "meta":
        return get_arch(device).num_sms
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}")
    return _cuda_device_num_sms(torch.cuda.current_device() if device.index is None else device.index)


def set_num_sms(count: int | None) -> None:
    """Let kernels fill at most `count` SMs from now on, in this process; None lifts the limit.

    Raises TypeError unless count is an int or None, ValueError below 1.
    """
    global _limit
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"num_sms: expected an int or None, got {count!r}")
        if count < 1:
            raise ValueError(f"num_sms: expected at least 1, got {count}")
    _limit = count


def get_limit() -> int | None:
    """The limit that `set_num_sms` has set, or None."""
    return _limit


def get_num_sms(device: torch.device | str | int | None = None) -> int:
    """Number of SMs that a kernel may fill on a device: all, or fewer if `set_num_sms` has set a limit."""
    on_device = get_device_num_sms(device)
    return on_device if _limit is None else min(_limit, on_device)


@contextmanager
def num_sms(count: int | None) -> Iterator[None]:
    """`set_num_sms(count)` for the length of a with block."""
    before = _limit
    set_num_sms(count)
    try:
        yield
    finally:
        set_num_sms(before)
