"""Allocations filled with 0xFF bytes, so that tests see elements that a kernel did not write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from tk_core.testing.trees import storage_bytes

_ALLOCATORS = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(Tensor.new_empty, Tensor.new_empty_strided),
}


def poison(x: Tensor) -> Tensor:
    """Fill a tensor's whole storage, gaps between strided rows included, with 0xFF bytes; returns x.

    0xFF bytes are NaN in every float format here that has one, -1 in signed integers, the largest unsigned integer.
    """
    if x.device.type != "meta" and not isinstance(x, FakeTensor):
        storage_bytes(x).fill_(0xFF)
    return x


# Not a dispatch mode: under one, ops leave their eager fast path, which is what has to be tested.
class _PoisonMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return poison(result) if func in _ALLOCATORS else result


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Context in which torch.empty, x.new_empty and the like return tensors of 0xFF bytes, on any device, of any dtype.

    Has no effect on code under torch.compile, which does its own allocations.
    """
    with _PoisonMode():
        yield
