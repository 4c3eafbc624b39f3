"""Checks of pairs of data and scale factors, and of the sizes of their blocks."""

from typing import Any

import torch

from tk_core import check
from tk_quant.lib.quantize import FLOAT4_DTYPE

E2M1_DTYPES = (torch.int8,) + ((FLOAT4_DTYPE,) if FLOAT4_DTYPE is not None else ())
"""Dtypes of tensors with two e2m1 codes a byte."""
BLOCK_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)


def pair_of(name: str, x: Any, expected: str = "a pair (data, sf)") -> tuple[Any, Any]:
    """The two items of a tuple or list; TypeError or ValueError for anything else."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        check.require_type(isinstance(x, tuple | list), name, expected, type(x).__name__)
        check.require(False, name, "a pair (data, sf)", f"{len(x)} items")
    return x[0], x[1]


def block_size_of(name: str, block_size: Any) -> tuple[int, int]:
    """(tokens, channels) of a block; TypeError or ValueError unless these are two ints."""
    check.require_type(isinstance(block_size, tuple | list), name, "a tuple of two", block_size)
    check.require(len(block_size) == 2, name, "two numbers", block_size)
    for side in block_size:
        check.integer(name, side)
    return block_size[0], block_size[1]
