"""TMA's requirements on a tensor's strides and base."""

import torch
from torch import Tensor
from torch.nn import Parameter

BYTES = 16
"""To which TMA needs bases and strides aligned."""


def bytes_off(x: Tensor) -> int:
    """Bytes from the last multiple of 16 to the base of x; 0 where that is not known.

    Fake tensors, those of torch.compile and of the meta device, and functorch's have no address.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter) or x.is_meta:
        return 0
    try:
        return x.data_ptr() % BYTES
    except RuntimeError:  # functorch's
        return 0


def for_tma(x: Tensor) -> Tensor:
    """x with strides that TMA accepts in dimensions of size 1, where torch may have any."""
    multiple = BYTES // x.element_size()
    if all(size > 1 or stride % multiple == 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)):
        return x
    strides = [stride if size > 1 else multiple for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return x.as_strided(x.shape, (*strides, x.stride(-1)))


def takes_tma(x: Tensor) -> bool:
    """Whether TMA can load from x: rows are contiguous, and the base and all other strides are on 16 bytes."""
    multiple = BYTES // x.element_size()
    is_contiguous = x.shape[-1] == 1 or x.stride(-1) == 1
    return is_contiguous and not bytes_off(x) and all(stride % multiple == 0 for stride in x.stride()[:-1])
