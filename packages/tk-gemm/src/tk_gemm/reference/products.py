"""Products of two matrices, of which the references of all ops are made, in plain PyTorch.

The sum of 128 products of e4m3 pairs takes at most 43 bits, so in float64 it is exact in any order: a row's result
does not depend on the other rows, nor on how torch multiplies matrices.
"""

import torch
from torch import Tensor

from tk_core.reference.scales import unpack_scales
from tk_gemm.check import BLOCK

# Temporaries of a product take about 20 bytes an element; this bounds them at 350 MB.
_MAX_ELEMENTS = 1 << 24


def fp8_product(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Tensor:
    """A·Bᵀ, float32 (M, N), of e4m3 a (M, K) and b (N, K) with factors (M, K/128), (N, K/128), float32 or packed.

    b_sf may have a row for each 128 of b's: (⌈N/128⌉, K/128).
    For each block of 128 along K, in order: acc = fma(a_sf · b_sf, partial, acc), with a_sf · b_sf and the exact sum of
    the block rounded to float32 first. The multiply-add is rounded to float64 before float32.
    """
    num_rows, num_cols = a.shape[0], b.shape[0]
    if b_sf.shape[0] != num_cols:
        b_sf = b_sf.repeat_interleave(BLOCK, dim=0)[:num_cols]
    out = torch.zeros((num_rows, num_cols), dtype=torch.float32, device=a.device)
    a_sf, b_sf = (unpack_scales(sf, sf.shape[0], a.shape[1] // BLOCK) for sf in (a_sf, b_sf))
    step = max(1, _MAX_ELEMENTS // max(1, num_cols))
    for block in range(a.shape[1] // BLOCK):
        channels = slice(block * BLOCK, (block + 1) * BLOCK)
        columns = b[:, channels].double().t()
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            partial = (a[rows, channels].double() @ columns).float().double()
            scale = (a_sf[rows, block, None] * b_sf[None, :, block]).double()
            out[rows] = (scale * partial + out[rows].double()).float()
    return out


def bf16_product(a: Tensor, b: Tensor) -> Tensor:
    """A·Bᵀ, float32 (M, N), of bfloat16 a (M, K) and b (N, K): summed in float64, rounded once."""
    num_rows, num_cols = a.shape[0], b.shape[0]
    out = torch.empty((num_rows, num_cols), dtype=torch.float32, device=a.device)
    step = max(1, _MAX_ELEMENTS // max(1, num_cols, a.shape[1]))
    columns = b.double().t()
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        out[rows] = (a[rows].double() @ columns).float()
    return out


def finish(product: Tensor, d: Tensor | None, c: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The product plus c, written into d, or into a new tensor of c's dtype, or of `dtype` without c."""
    if c is not None:
        product = product + c.float()
        dtype = c.dtype
    return product.to(dtype) if d is None else d.copy_(product)
