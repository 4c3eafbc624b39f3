"""Tensors that begin off the 16 bytes that kernels load and store at a time."""

from torch import Tensor


def aligned(x: Tensor, alignment: int = 16) -> Tensor:
    """x itself if its address is a multiple of `alignment` bytes, as it nearly always is, else a copy of it.

    A kernel that writes into the copy of an output has it copied back afterwards.
    """
    return x if x.data_ptr() % alignment == 0 else x.clone()
