"""What serves a call: kernels or the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tk_core import env

_forced_backend: str | None = None
kernels_only = False
"""Whether kernels serve CUDA tensors and TK_DEBUG is off. False until `look_up` has looked that up."""
_one_device = False


def current_device() -> int:
    """Index of the current CUDA device, without asking the driver if there is only one."""
    return 0 if _one_device else torch.cuda.current_device()


def look_up() -> None:
    """Look up what `kernels_only` and `current_device` say: after the first call that kernels serve."""
    global kernels_only, _one_device
    kernels_only = (_forced_backend or env.default_backend()) == "kernel" and not env.debug()
    _one_device = torch.cuda.device_count() == 1


@contextmanager
def backend(name: Literal["kernel", "reference"]) -> Iterator[None]:
    """Serve CUDA tensors by `name`, kernel or reference, within a with block; CPU tensors always get the reference.

    Applies to the whole process, and to code that torch.compile has compiled: operators read the backend at run time.
    """
    global _forced_backend, kernels_only
    if name not in ("kernel", "reference"):
        raise ValueError(f"backend: expected 'kernel' or 'reference', got {name!r}")
    before, _forced_backend, kernels_only = _forced_backend, name, False
    try:
        yield
    finally:
        _forced_backend, kernels_only = before, False


def uses_reference(device: torch.device) -> bool:
    """Whether the reference, not a kernel, serves ops on this device."""
    return device.type != "cuda" or (_forced_backend or env.default_backend()) == "reference"
