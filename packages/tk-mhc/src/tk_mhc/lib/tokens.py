"""Checks of streams (..., m, H), and the shapes that the kernels are built for."""

from typing import Any

import torch

from tk_core import check

MHC_MULTS = (2, 4, 8)
"""Numbers of streams that the kernels are built for."""
HIDDEN_MULTIPLE = 64
"""Every hidden size is a multiple of it."""
MAX_HIDDEN = 8192
MAX_REPEAT = 1000
"""Sinkhorn's iterations, at most: the sums of so many fit into shared memory in the backward, on any GPU."""


def check_streams(
    name: str, x: Any, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,), *, layout: check.Layout = "contiguous"
) -> tuple[tuple[int, ...], int, int]:
    """Check a tensor of streams (..., m, H), and return its leading dimensions, m and H.

    Raises TypeError for another type or dtype, ValueError for another shape or layout, or unless m is 2, 4 or 8 and H a
    multiple of 64, 64 to 8192.
    """
    *leading, mhc_mult, hidden = check.tensor(name, x, dtypes, (..., "mhc_mult", "hidden"), layout=layout)
    check.one_of(f"mhc_mult (dimension -2 of {name})", mhc_mult, MHC_MULTS)
    check_hidden(f"hidden (last dimension of {name})", hidden)
    return tuple(leading), mhc_mult, hidden


def check_hidden(name: str, hidden: int) -> None:
    """Raise ValueError unless `hidden` is a multiple of 64, 64 to 8192."""
    check.in_range(name, hidden, HIDDEN_MULTIPLE, MAX_HIDDEN)
    check.multiple_of(name, hidden, HIDDEN_MULTIPLE)


def check_repeat(name: str, repeat: Any) -> None:
    """Raise TypeError unless the number of Sinkhorn's iterations is an int, ValueError unless it is 1 to 1000."""
    check.in_range(name, repeat, 1, MAX_REPEAT)


def check_fn(name: str, fn: Any, mhc_mult: int, hidden: int, device: torch.device) -> int:
    """Check the projection's weight, float32 (m·(m+2), m·H) or (m, m·H), and return its number of rows.

    Raises TypeError for another type or dtype, ValueError for another shape, stride or device.
    """
    num_rows, _ = check.tensor(name, fn, (torch.float32,), ("rows", mhc_mult * hidden), device=device)
    rows = (mhc_mult * (mhc_mult + 2), mhc_mult)
    check.require(num_rows in rows, f"rows of {name}", "{}, or {} for the head", num_rows, *rows)
    return num_rows
