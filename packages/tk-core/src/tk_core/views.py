"""Views and copies in the form that kernels need: addresses aligned to 16 bytes, leading dimensions merged into one."""

from torch import Tensor


def aligned(x: Tensor, alignment: int = 16) -> Tensor:
    """x itself if its address is a multiple of `alignment` bytes, as it nearly always is, else a copy of it.

    If a kernel writes into the copy of an output, the caller copies it back afterwards.
    """
    return x if x.data_ptr() % alignment == 0 else x.clone()


def flat(x: Tensor, num_dims: int) -> Tensor:
    """x with all but its last `num_dims` dimensions merged into one: (..., m, H) → (num_tokens, m, H). A view."""
    return x if x.ndim == num_dims + 1 else x.view(-1, *x.shape[x.ndim - num_dims :])
