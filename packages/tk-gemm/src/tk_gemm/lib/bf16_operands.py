"""Checks of bfloat16 operands, which may be contiguous along K or, transposed, along their rows."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_gemm.lib.operands import BF16, matrix, positive_multiple


def in_either_order(
    name: str, x: Any, shape: check.Shape, device: torch.device | None = None
) -> tuple[Tensor, bool, torch.Size]:
    """Check an operand (…, rows, K), contiguous along K or along its rows, K a multiple of 64.

    Returns the operand as it lies in memory, with K before rows if it is transposed; whether it is; and x's shape.
    """
    is_transposed = isinstance(x, Tensor) and x.ndim == len(shape) and x.stride(-1) != 1 and x.stride(-2) == 1
    if is_transposed:
        matrix(name, x.mT, BF16, (*shape[:-2], shape[-1], shape[-2]), device)
    else:
        matrix(name, x, BF16, shape, device)
    positive_multiple(f"{name} (K)", x.shape[-1], 64)
    return x.mT if is_transposed else x, is_transposed, x.shape


def bf16_weights(b: Any, num_channels: int, device: torch.device, *groups: int | str) -> tuple[Tensor, bool, int]:
    """Check weights (groups…, N, K) in either order. Returns them as they lie, whether they are transposed, and N."""
    b, is_transposed, found = in_either_order("b", b, (*groups, "N", num_channels), device)
    if groups:
        check.require(found[0] > 0, "b", "at least one group", found[0])
    positive_multiple("b (N)", found[-2], 8)
    return b, is_transposed, found[-2]
