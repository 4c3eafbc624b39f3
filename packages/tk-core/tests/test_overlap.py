"""What shares memory, and which calls of an operator may write into it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tk_core import overlap
from tk_core.op import launching, op

MEMORY = torch.zeros(64)


@pytest.mark.parametrize(
    ("first", "second", "is_overlapping"),
    [
        (MEMORY[:8], MEMORY[8:16], False),
        (MEMORY[:8], MEMORY[7:16], True),
        (MEMORY[7:16], MEMORY[:8], True),
        (MEMORY, MEMORY, True),
        (MEMORY[:8], MEMORY[8:16].view(torch.int32), False),
        (MEMORY[4:6], MEMORY[:8].view(torch.uint8), True),
        (MEMORY.view(8, 8)[:4, :4], MEMORY[28:], False),
        (MEMORY.view(8, 8)[:4, :4], MEMORY[27:], True),
        (MEMORY[4:4], MEMORY, False),
        (MEMORY, torch.zeros(64), False),
    ],
)
def test_overlap(first: torch.Tensor, second: torch.Tensor, is_overlapping: bool) -> None:
    assert overlap.overlap(first, second) == is_overlapping
    assert overlap.overlap(second, first) == is_overlapping
    for x, y in ((first, second), (second, first)):
        if is_overlapping:
            with pytest.raises(ValueError, match=r"^y: expected memory of its own, got some of x$"):
                overlap.check_written(("x", "y"), (x, y), [1])
        else:
            overlap.check_written(("x", "y"), (x, y), [1])
        overlap.check_written(("x", "y", "z"), (x, y, torch.zeros(1)), [2])


ROWS = MEMORY.view(4, 2, 8)


@pytest.mark.parametrize(
    ("x", "y", "are_apart"),
    [
        (ROWS[..., :3], ROWS[..., 3:], True),
        (ROWS[..., 3:], ROWS[..., :3], True),
        (ROWS[..., :4], ROWS[..., 3:], False),
        (ROWS[:, 0, :5], ROWS[:, 1], True),
        (ROWS[:, :1, :5], ROWS[:, 0, 5:], True),
        (ROWS[:, 0, 4:], ROWS[1:, 0, :4], True),
        (ROWS[:, :, 4:], ROWS[:, 1, :5], False),
        (ROWS[..., :4], ROWS[..., 4:].view(torch.int32), True),
        (ROWS[..., :4], ROWS[..., 3:].view(torch.uint8)[..., 4:], True),
        (ROWS[..., :4], ROWS[..., 3:].view(torch.uint8)[..., 3:], False),
        (MEMORY.as_strided((4, 2), (8, 1)), MEMORY.as_strided((4, 2), (12, 1), 2), False),
        (MEMORY.as_strided((4, 2), (8, 1)), MEMORY.as_strided((3, 2), (16, 1), 2), True),
        (MEMORY.as_strided((4, 4), (4, 1)), MEMORY.as_strided((3, 2), (0, 1), 15), False),
        # Apart, but not in rows of one length: refused, as any that are too hard to tell.
        (MEMORY[0:12:2], MEMORY[1:12:3], False),
    ],
)
def test_tensors_beside_each_other(x: Tensor, y: Tensor, are_apart: bool) -> None:
    overlaps = overlap.overlap(x, y)
    assert (overlap.lie_beside(x, y) or not overlaps) == (overlap.lie_beside(y, x) or not overlaps) == are_apart
    used = torch.zeros(256)
    for z in (x, y):
        places = z.storage_offset() * z.element_size() + torch.arange(z.element_size())
        for size, stride in zip(z.shape, z.stride()):
            places = places[..., None] + torch.arange(size) * (stride * z.element_size())
        used[places.unique()] += 1
    assert not are_apart or used.max() == 1
    if are_apart:
        overlap.check_written(("x", "y"), (x, y), [0, 1])
    else:
        with pytest.raises(ValueError, match=r"^x: expected memory of its own, got some of y$"):
            overlap.check_written(("x", "y"), (x, y), [0])


@pytest.mark.parametrize(
    ("shape", "strides", "is_refused"),
    [
        ((4, 8), (8, 1), False),
        ((4, 8), (0, 1), True),
        ((4, 8), (7, 1), True),
        ((4, 8), (16, 2), False),
        ((8, 4), (1, 8), False),
        ((4, 1), (1, 0), False),
        ((0, 4), (0, 0), False),
        ((2, 2, 2), (4, 1, 1), True),
    ],
)
def test_elements_that_share_memory(shape: tuple[int, ...], strides: tuple[int, ...], is_refused: bool) -> None:
    x = MEMORY.as_strided(shape, strides)
    overlap.check_written(("x",), (x,), [])
    if not is_refused:
        overlap.check_written(("x",), (x,), [0])
        return
    with pytest.raises(ValueError, match=r"^x: expected elements apart in memory, got strides"):
        overlap.check_written(("x",), (x,), [0])


def _add_reference(x: Tensor, others: Sequence[Tensor], out: Tensor, counts: Sequence[Tensor]) -> None:
    out.copy_(x + sum(others))
    for count in counts:
        count.fill_(len(others))


@op(writes=("out", "counts"), in_place={"out": ("x",)}, reference=_add_reference)
def _add(x: Tensor, others: Sequence[Tensor], out: Tensor, counts: Sequence[Tensor]) -> None:
    assert not launching(out, counts)


@pytest.mark.parametrize(
    ("x", "other", "out", "count", "message"),
    [
        (slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 25), None),
        (slice(0, 8), slice(8, 16), slice(0, 8), slice(24, 25), None),
        (slice(0, 8), slice(8, 16), slice(1, 9), slice(24, 25), "out: expected memory of its own, got some of x"),
        (slice(0, 8), slice(8, 16), slice(14, 22), slice(24, 25), r"out: .* of others\[1\]"),
        (slice(0, 8), slice(8, 16), slice(16, 24), slice(17, 18), r"out: .* of counts\[0\]"),
        (slice(0, 8), slice(8, 16), slice(16, 24), slice(0, 1), r"counts\[0\]: .* of x"),
        (slice(0, 8), slice(8, 16), slice(16, 24), slice(30, 31), r"counts\[0\]: .* of counts\[1\]"),
    ],
)
def test_an_operator_writes_into_memory_of_its_own(
    x: slice, other: slice, out: slice, count: slice, message: str | None
) -> None:
    memory = torch.arange(32.0)
    parts = memory[x], [torch.ones(8), memory[other]], memory[out], [memory[count], memory[30:31]]
    before = memory.clone()
    if message is None:
        expected = memory[x] + 1 + memory[other]
        _add(*parts)
        assert torch.equal(memory[out], expected)
        return
    with pytest.raises(ValueError, match=message):
        _add(*parts)
    assert torch.equal(memory, before)
