"""A fused multiply-add in PyTorch, which has none."""

import torch
from torch import Tensor

_AT_ONCE = 2**24
"""Elements that are computed at once: each takes some 70 bytes on the way."""


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of float32 or bfloat16 tensors as float32, rounded once, to nearest even. Autograd follows it.

    The product is exact in float64. The sum may not be; rounding it to nearest and then to float32 would round twice.
    So it is rounded to odd: an inexact sum becomes its neighbour with an odd last bit, which is never a tie for
    float32, 29 bits shorter (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). If an argument
    is float64, all is computed in float64 and rounded twice.
    """
    if torch.float64 in (a.dtype, b.dtype, c.dtype):
        return a * b + c
    a, b, c = torch.broadcast_tensors(a, b, c)
    if a.numel() <= _AT_ONCE or len(a) == 1:
        return _fma(a, b, c)
    rows = max(_AT_ONCE * len(a) // a.numel(), 1)
    return torch.cat([_fma(*parts) for parts in zip(*(x.split(rows) for x in (a, b, c)))])


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    with torch.no_grad():
        # Knuth's TwoSum: total + error is the exact sum.
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        bits = total.view(torch.int64)
        # Adding 1 to the bits is one step away from zero, and makes an even last bit odd.
        odd = (bits + torch.where((error > 0) == (total > 0), 1, -1)).view(torch.float64)
        is_moved = total.isfinite() & (error != 0) & (bits & 1 == 0)
        to_odd = torch.where(is_moved, odd - total, -0.0)  # 0.0 would turn a total of -0.0 into 0.0
    return (total + to_odd).float()
