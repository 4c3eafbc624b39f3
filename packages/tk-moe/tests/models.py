"""What the cases of several ops share: sizes of real models, names, cases of benchmarks."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from tk_core.testing import Case, Make, bench_case

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
        cases.append(bench_case(name.format(*numbers), make(*numbers), model_shape=size in models, **flags))
    return cases
