"""Launches of kernels that need tensors aligned to 16 bytes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tk_core.views import aligned


def launch_aligned(launch: Callable[..., None], *args: Any, outputs: tuple[Tensor | None, ...]) -> None:
    """Launch a kernel, with aligned copies of tensors that are not aligned; copies of `outputs` are copied back."""
    given = [aligned(x) if isinstance(x, Tensor) else x for x in args]
    launch(*given)
    for x, copy in zip(args, given):
        if copy is not x and any(x is out for out in outputs):
            x.copy_(copy)
