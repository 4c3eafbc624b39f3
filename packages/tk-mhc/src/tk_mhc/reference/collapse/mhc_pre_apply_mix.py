"""Reference of mhc_pre_apply_mix, with a true fused multiply-add."""

import torch
from torch import Tensor


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of float32 tensors, rounded once, to nearest even. Autograd follows it.

    The product is exact in float64. The sum may not be; rounding it to nearest and then to float32 would round twice.
    So it is rounded to odd: an inexact sum becomes its neighbour with an odd last bit, which is never a tie for
    float32, 29 bits shorter (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    with torch.no_grad():
        # Knuth's TwoSum: total + error is the exact sum.
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total))
        is_even = total.view(torch.int64) & 1 == 0
        to_odd = torch.where(total.isfinite() & (error != 0) & is_even, odd - total, 0.0)
    return (total + to_odd).float()


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """out = Σ_s mix[s] · x[s] by fused multiply-adds in float32, from 0, streams ascending; rounded to x's dtype.

    x (..., m, H) and mix (..., m, 1); out (..., H), or a new tensor. Float64 is computed in float64, without fma.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-2], x.shape[-1]))
    total = torch.zeros_like(out, dtype=torch.promote_types(x.dtype, torch.float32))
    for stream, weight in zip(x.unbind(-2), mix.unbind(-2), strict=True):
        total = total + weight * stream if x.dtype is torch.float64 else _fma(weight, stream, total)
    return out.copy_(total)
