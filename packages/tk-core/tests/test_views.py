"""Tensors whose addresses are no multiple of 16 bytes."""

import torch

from tk_core.testing import assert_equal
from tk_core.views import aligned


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
