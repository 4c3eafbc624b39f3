"""Reference of engram_sinkhorn_momentum_update, with a true fused multiply-add."""

import torch
from torch import Tensor


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c, rounded once to float32. Float64 is computed in float64, rounded twice.

    In float64 the product of two float32 is exact, but the sum may not be. An inexact sum whose last bit is 0 is moved
    by one bit towards the exact sum: then it is never halfway between two float32 unless the exact sum is.
    """
    if a.dtype is torch.float64:
        return a * b + c
    p, c = a.double() * b.double(), c.double()
    total = p + c
    # The exact rounding error of total (Knuth's TwoSum).
    of_c = total - p
    lost = (p - (total - of_c)) + (c - of_c)
    is_even = total.view(torch.int64) % 2 == 0
    towards = torch.copysign(torch.full_like(total, torch.inf), lost)
    is_moved = is_even & (lost != 0) & total.isfinite()
    return torch.where(is_moved, torch.nextafter(total, towards), total).float()


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """m' = fma(m, β, (1 - β) · g), rounded, to momentum_buffer; returns fma(g, 1 - β, β · m') with nesterov, else m'.

    In float32 with rounded products, for float64 grad in float64.
    """
    dtype = torch.promote_types(grad.dtype, torch.float32)
    g, m = grad.to(dtype), momentum_buffer.to(dtype)
    beta, rest = (torch.tensor(value, dtype=dtype, device=g.device) for value in (beta1, 1.0 - beta1))
    average = _fma(m, beta, rest * g)
    momentum_buffer.copy_(average)
    return _fma(g, rest, beta * average) if nesterov else average
