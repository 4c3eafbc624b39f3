"""Launches with tensors whose addresses are no multiple of 16 bytes."""

from typing import Any

import torch

from tk_moe.lib.launch_aligned import launch_aligned


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
