"""get_mn_major_tma_aligned_tensor: scale factors with unit stride along rows, columns on 16 bytes."""

import torch

from tk_core import check
from tk_core.math import align
from tk_gemm.lib.operands import FLOAT32
from tk_gemm.lib.tma import bytes_off


def get_mn_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """Give float32 factors (R, C) or (G, R, C) the strides (1, align(R, 4)), groups one after the other.

    Returns x itself if it has those strides already and its base is on 16 bytes, else a copy; on any device, in plain
    PyTorch. The name is DeepGEMM 2.6's. Raises TypeError for another dtype, ValueError for another rank.
    """
    check.tensor("x", x, FLOAT32, (..., "R", "C"), layout="any")
    check.require(x.ndim in (2, 3), "x", "2 or 3 dimensions", x.ndim)
    num_rows, num_cols = x.shape[-2:]
    column = align(num_rows, 4)
    strides = (column * num_cols, 1, column)[-x.ndim :]
    if x.stride() == strides and not bytes_off(x):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
