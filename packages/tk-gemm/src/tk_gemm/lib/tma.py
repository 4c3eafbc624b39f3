"""TMA's requirements on a tensor's strides and base."""

from torch import Tensor

_BYTES = 16


def for_tma(x: Tensor) -> Tensor:
    """x with strides that TMA accepts in dimensions of size 1, where torch may have any."""
    multiple = _BYTES // x.element_size()
    if all(size > 1 or stride % multiple == 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)):
        return x
    strides = [stride if size > 1 else multiple for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return x.as_strided(x.shape, (*strides, x.stride(-1)))


def takes_tma(x: Tensor) -> bool:
    """Whether TMA can load from x: rows are contiguous, and the base and all other strides are on 16 bytes."""
    multiple = _BYTES // x.element_size()
    is_contiguous = x.shape[-1] == 1 or x.stride(-1) == 1
    is_aligned = x.is_meta or x.data_ptr() % _BYTES == 0
    return is_contiguous and is_aligned and all(stride % multiple == 0 for stride in x.stride()[:-1])
