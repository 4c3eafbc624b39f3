"""Tensors at any address for ops' inputs, and cases for benchmarks."""

import math

import torch
from torch import Tensor

from tk_core.testing import Case, Make


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str, first_element: int = 0) -> Tensor:
    """An uninitialized tensor that starts at element `first_element` of its storage."""
    return torch.empty(first_element + math.prod(shape), dtype=dtype, device=device)[first_element:].view(shape)


def bench(name: str, make: Make, **flags: bool) -> Case:
    """A case that only serves benchmarks, and perhaps the compile tier."""
    return Case(f"{name}-bench", make, bench=True, gpu=False, **flags)
