"""Views and copies that kernels ask for: addresses that are multiples of 16, leading dimensions made one."""

from torch import Tensor


def aligned(x: Tensor, alignment: int = 16) -> Tensor:
    """x itself if its address is a multiple of `alignment` bytes, as it nearly always is, else a copy of it.

    A kernel that writes into the copy of an output has it copied back afterwards.
    """
    return x if x.data_ptr() % alignment == 0 else x.clone()


def flat(x: Tensor, num_dims: int) -> Tensor:
    """x with all but its last `num_dims` dimensions made one: (..., m, H) → (num_tokens, m, H). A view."""
    return x if x.ndim == num_dims + 1 else x.view(-1, *x.shape[x.ndim - num_dims :])
