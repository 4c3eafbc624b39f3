"""check.no_overlap, and what calls of replayed functions do with it."""

import pytest
import torch

from tk_core import check

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
    assert check.overlap(first, second) == is_overlapping
    assert check.overlap(second, first) == is_overlapping


def test_apart_names_both() -> None:
    check.no_overlap("out", MEMORY[:8], x=MEMORY[8:], weights=None)
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of x"):
        check.no_overlap("out", MEMORY[:8], weights=None, x=MEMORY[4:])


def test_apart_looks_at_no_fake_tensor() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(MEMORY)
        check.no_overlap("out", fake, x=fake)
    meta = torch.empty(4, device="meta")
    check.no_overlap("out", meta, x=meta)
