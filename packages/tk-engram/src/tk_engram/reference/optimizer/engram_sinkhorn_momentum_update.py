"""Reference of engram_sinkhorn_momentum_update."""

import torch
from torch import Tensor

from tk_core.reference.fma import fma


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """m' = fma(m, β, (1 - β) · g), rounded, to momentum_buffer; returns fma(g, 1 - β, β · m') with nesterov, else m'.

    In float32 with rounded products, for float64 grad in float64.
    """
    dtype = torch.promote_types(grad.dtype, torch.float32)
    g, m = grad.to(dtype), momentum_buffer.to(dtype)
    beta, rest = (torch.tensor(value, dtype=dtype, device=g.device) for value in (beta1, 1.0 - beta1))
    average = fma(m, beta, rest * g)
    momentum_buffer.copy_(average)
    return fma(g, rest, beta * average) if nesterov else average
