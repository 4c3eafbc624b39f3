"""What the cases of several ops share: sizes of real models, names, cases of benchmarks, storage."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from tk_core.testing import Case, Make

MODEL_EXPERTS = (8, 16, 32, 36, 64, 72, 96, 108, 128, 144, 256, 288, 384, 512)
"""Numbers of experts."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in case names."""
    return str(dtype).removeprefix("torch.").replace("_", "-").replace("bfloat16", "bf16")


def benches(
    name: str, make: Callable[..., Make], sizes: Iterable[Any], models: Collection[Any] = (), **flags: bool
) -> list[Case]:
    """Cases that serve benchmarks alone: for each of `sizes`, one or several numbers, `make(*size)` and its name.

    `models` are those of the sizes that real models have.
    """
    cases = []
    for size in sizes:
        numbers = size if isinstance(size, tuple) else (size,)
        which = {"bench": True, "gpu": False, "model_shape": size in models, **flags}
        cases.append(Case(f"{name.format(*numbers)}-bench", make(*numbers), **which))
    return cases


def starting_at(
    first_element: int, shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A contiguous tensor, not initialized, that starts at element `first_element` of its storage."""
    size = torch.Size(shape).numel()
    return torch.empty(first_element + size, dtype=dtype, device=device)[first_element:].view(shape)
