"""References of the products of K grouped by expert."""

from itertools import accumulate

import torch
from torch import Tensor

from tk_core.math import align
from tk_core.reference.scales import unpack_scales
from tk_gemm.check import BLOCK, Pair, Recipe
from tk_gemm.reference.products import bf16_product, finish, fp8_product


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    ks: list[int] | Tensor,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
) -> Tensor:
    """D[g] = A_g·B_gᵀ + C[g] over the group's range of K. See tk_gemm.k_grouped_fp8_gemm_nt_contiguous."""
    factors = []
    for data, sf in (a, b):
        sf = sf.t() if data.ndim == 2 else sf
        factors.append(unpack_scales(sf, sf.shape[0], data.numel() // sf.shape[0] // BLOCK))
    (num_rows, num_blocks), num_cols = factors[0].shape, factors[1].shape[0]
    if d is None:
        dtype = torch.float32 if c is None else c.dtype
        d = factors[0].new_empty((len(ks), num_rows, num_cols), dtype=dtype)
    for group, (first, end) in enumerate(_k_ranges(ks, num_blocks * BLOCK)):
        blocks = slice(first // BLOCK, end // BLOCK)
        operands = []
        for (data, _), sf in zip((a, b), factors):
            num_rows = sf.shape[0]
            if data.ndim == 2:
                part = data[:, first:end]
            else:
                part = data[first * num_rows : end * num_rows].view(num_rows, end - first)
            operands += [part, sf[:, blocks]]
        finish(fp8_product(*operands), d[group], None if c is None else c[group])
    return d


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    ks: list[int] | Tensor,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
) -> Tensor:
    """D[g] = A_gᵀ·B_g + C[g] over the group's rows. See tk_gemm.k_grouped_bf16_gemm_tn_contiguous."""
    if d is None:
        d = a.new_empty((len(ks), a.shape[1], b.shape[1]), dtype=torch.float32 if c is None else c.dtype)
    for group, (first, end) in enumerate(_k_ranges(ks, a.shape[0])):
        finish(bf16_product(a[first:end].t(), b[first:end].t()), d[group], None if c is None else c[group])
    return d


def _k_ranges(ks: list[int] | Tensor, total: int) -> list[tuple[int, int]]:
    """`(first, end)` along K of each group, from sizes (a list) or ends (a tensor, aligned here), at most `total`."""
    if isinstance(ks, Tensor):
        ends = [align(min(max(end, 0), total), BLOCK) for end in ks.tolist()]
    else:
        ends = list(accumulate(ks))
    return list(zip([0, *ends[:-1]], ends))
