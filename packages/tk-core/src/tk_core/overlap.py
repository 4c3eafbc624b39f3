"""Memory that tensors share: an operator writes only into memory of its own."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from tk_core import kernel

_LISTS = list, tuple


def extent(x: Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last."""
    if x.is_contiguous():
        return x.numel() * x.element_size()
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the address ranges of x and y, from the first to the last element, overlap."""
    begin, other = x.data_ptr(), y.data_ptr()
    return begin < other + extent(y) and other < begin + extent(x) and x.numel() > 0 and y.numel() > 0


def lie_beside(x: Tensor, y: Tensor) -> bool:
    """Whether x and y are apart in each row of one memory, as queries and keys in a projection's output are.

    Rows are as long as a stride that divides all larger ones of both; within a row, x and y each have a stretch.
    """
    strides = [
        [(stride * z.element_size(), size) for stride, size in zip(z.stride(), z.shape) if size > 1] for z in (x, y)
    ]
    both = {stride for each in strides for stride, _ in each}
    for row in both - {0}:
        if any(stride >= row and stride % row for stride in both):
            continue
        of_x, of_y = (
            z.element_size() + sum((size - 1) * stride for stride, size in each if stride < row)
            for z, each in zip((x, y), strides)
        )
        between = (y.data_ptr() - x.data_ptr()) % row
        if of_x <= between and between + of_y <= row:
            return True
    return False


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


def named(names: Sequence[str], args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments, those in lists too, with their names: "x", or "xs[1]" for one in the list xs.

    A parameter x_, which an op has beside x for an argument that some calls write, is named x, too.
    """
    found = []
    for name, x in zip(names, args):
        name = name.rstrip("_")
        each = [(f"{name}[{i}]", y) for i, y in enumerate(x)] if isinstance(x, _LISTS) else [(name, x)]
        found += [(label, y) for label, y in each if isinstance(y, Tensor)]
    return found


def _are_same(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())


def _check_each(
    names: Sequence[str], args: Sequence[Any], written: Collection[int], in_place: Collection[tuple[str, str]]
) -> None:
    tensors = named(names, args)
    for name, x in named([names[index] for index in written], [args[index] for index in written]):
        if _repeats(x):
            got = f"strides {x.stride()} for shape {tuple(x.shape)}"
            raise ValueError(f"{name}: expected elements apart in memory, got {got}")
        for other, y in tensors:
            is_allowed = other == name or ((name, other) in in_place and _are_same(x, y))
            if not is_allowed and overlap(x, y) and not lie_beside(x, y):
                raise ValueError(f"{name}: expected memory of its own, got some of {other}")


def check_written(
    names: Sequence[str], args: Sequence[Any], written: Collection[int], in_place: Collection[tuple[str, str]] = ()
) -> None:
    """Raise ValueError if a tensor that is written shares memory with another, or its elements with each other.

    `written` has the indices of arguments that are written. Of the pairs of names in `in_place` the first, which is
    written, may be exactly the second: at the same address, with the same dtype, shape and strides.
    """
    if (recorded := kernel.recording()) is not None:
        recorded.written.extend(x for _, x in named(names, [args[index] for index in written]))
    spans, is_suspect = [], False
    for index, x in enumerate(args):
        is_written = index in written
        for y in (x,) if isinstance(x, Tensor) else x if isinstance(x, _LISTS) else ():
            if isinstance(y, Tensor):
                begin = y.data_ptr()
                if y.is_contiguous():
                    spans.append((begin, begin + y.nbytes, is_written))
                else:
                    spans.append((begin, begin + extent(y), is_written))
                    is_suspect = is_suspect or (is_written and _repeats(y))
    # By address: what is written has to begin where all before it have ended, the others where what is written has.
    spans.sort()
    end_of_all = end_of_written = 0
    for begin, end, is_written in spans:
        if begin < (end_of_all if is_written else end_of_written):
            is_suspect = True
        if end > end_of_all:
            end_of_all = end
        if is_written and end > end_of_written:
            end_of_written = end
    if is_suspect:
        _check_each(names, args, written, in_place)
