"""Tensors whose addresses are no multiple of 16 bytes."""

from typing import Any

import torch

from tk_core.testing import assert_equal
from tk_core.views import aligned, launch_aligned


def test_aligned_copies_only_what_is_not() -> None:
    storage = torch.randn(80)
    assert storage.data_ptr() % 16 == 0, "torch allocates at multiples of 64"
    for first in range(5):
        x = storage[first : first + 64].view(4, 16)
        y = aligned(x)
        assert (y is x) == (first % 4 == 0)
        assert y.data_ptr() % 16 == 0
        assert_equal(y, x)
        assert (aligned(x, 8) is x) == (first % 2 == 0)


def unaligned(size: int) -> torch.Tensor:
    """Zeros whose address is no multiple of 16."""
    storage = torch.zeros(size + 1)
    return storage[1:] if storage.data_ptr() % 16 == 0 else storage[:-1]


def test_a_launch_gets_aligned_tensors_and_its_outputs_are_copied_back() -> None:
    x, first, second = torch.ones(4), unaligned(4), torch.zeros(4)
    read = unaligned(4)

    def launch(*args: Any) -> None:
        assert all(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor))
        for arg in args[1:4]:
            arg.fill_(7)

    launch_aligned(launch, x, first, second, read, None, 3, outputs=(first, second))
    assert first.tolist() == second.tolist() == [7.0] * 4
    assert read.tolist() == [0.0] * 4
