"""Memory that tensors share: an operator writes only into memory of its own."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from tk_core import kernel


def extent(x: Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last."""
    if x.is_contiguous():
        return x.numel() * x.element_size()
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the address ranges of x and y, from the first to the last element, overlap."""
    begin, other = x.data_ptr(), y.data_ptr()
    return begin < other + extent(y) and other < begin + extent(x) and x.numel() > 0 and y.numel() > 0


def _repeats(x: Tensor) -> bool:
    """Whether elements of x may share an address, as those of an expanded tensor do."""
    if x.is_contiguous():
        return False
    last = 0
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride <= last:
                return True
            last += (size - 1) * stride
    return False


def _named(name: str, x: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument, a tensor or a list, with their names."""
    if isinstance(x, list | tuple):
        return [(f"{name}[{i}]", y) for i, y in enumerate(x) if isinstance(y, Tensor)]
    return [(name, x)] if isinstance(x, Tensor) else []


def _are_same(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())


def _check_each(
    names: Sequence[str], args: Sequence[Any], written: Collection[int], in_place: Collection[tuple[str, str]]
) -> None:
    named = [pair for name, x in zip(names, args) for pair in _named(name, x)]
    for name, x in (pair for index in written for pair in _named(names[index], args[index])):
        if _repeats(x):
            got = f"strides {x.stride()} for shape {tuple(x.shape)}"
            raise ValueError(f"{name}: expected elements apart in memory, got {got}")
        for other, y in named:
            is_allowed = other == name or ((name, other) in in_place and _are_same(x, y))
            if not is_allowed and overlap(x, y):
                raise ValueError(f"{name}: expected memory of its own, got some of {other}")


def check_written(
    names: Sequence[str], args: Sequence[Any], written: Collection[int], in_place: Collection[tuple[str, str]] = ()
) -> None:
    """Raise ValueError if a tensor that is written shares memory with another, or its elements with each other.

    `written` has the indices of arguments that are written. Of the pairs of names in `in_place` the first, which is
    written, may be exactly the second: at the same address, with the same dtype, shape and strides.
    """
    if (recorded := kernel.recording()) is not None:
        recorded.written.extend(x for index in written for _, x in _named("", args[index]))
    spans, is_suspect = [], False
    for index, x in enumerate(args):
        is_written = index in written
        for y in x if isinstance(x, list | tuple) else (x,):
            if isinstance(y, Tensor):
                begin = y.data_ptr()
                spans.append((begin, begin + extent(y), is_written))
                is_suspect = is_suspect or (is_written and _repeats(y))
    # By address: what is written has to begin where all before it have ended, the others where what is written has.
    end_of_all = end_of_written = 0
    for begin, end, is_written in sorted(spans):
        is_suspect = is_suspect or begin < (end_of_all if is_written else end_of_written)
        end_of_all = max(end_of_all, end)
        if is_written:
            end_of_written = max(end_of_written, end)
    if is_suspect:
        _check_each(names, args, written, in_place)
