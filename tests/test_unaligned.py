"""Every op takes tensors whose addresses are multiples of nothing but the size of their elements."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec, load_specs
from tk_core.testing.trees import map_tensors, storage_bytes, tensors


def moved(x: Tensor) -> Tensor:
    """The same strides and bytes, one element further on in a storage of their own."""
    size = x.element_size()
    num_bytes = x.untyped_storage().nbytes() + size
    storage = torch.empty(num_bytes, dtype=torch.uint8, device=x.device, pin_memory=x.is_pinned())
    storage[size:] = storage_bytes(x)
    return storage.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset() + 1)


def run(function: Callable[..., Any], spec: OpSpec, kwargs: dict[str, Any]) -> Any:
    """What the op or its reference returns, and after it what it writes into."""
    result = function(**kwargs)
    return (result, *(kwargs[name] for name in spec.mutates)) if spec.mutates else result


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(spec, case, id=f"{spec.name}-{case.name}")
        for spec in load_specs().values()
        for case in spec.cases
        if case.modes
    ],
)
def test_gpu_unaligned_tensors(spec: OpSpec, case: Case) -> None:
    kwargs = case.make("cuda")
    unaligned = map_tensors(moved, kwargs)
    assert all(x.data_ptr() % 16 for x in tensors(unaligned) if x.numel())
    spec.compare(run(spec.op, spec, unaligned), run(spec.reference, spec, kwargs))
