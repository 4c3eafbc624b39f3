"""Reference of k_grouped_fp8_gemm_nt_contiguous."""

import torch

from tk_core.reference.scales import unpack_scales
from tk_gemm.reference.lib.groups import k_ranges
from tk_gemm.reference.lib.products import BLOCK, fp8_product


def k_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None,
    ks: list[int] | torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
) -> torch.Tensor:
    """D[g] = A_g·B_gᵀ + C[g] over the group's range of K. See tk_gemm.k_grouped_fp8_gemm_nt_contiguous."""
    factors = []
    for data, sf in (a, b):
        sf = sf.t() if data.ndim == 2 else sf
        factors.append(unpack_scales(sf, sf.shape[0], data.numel() // sf.shape[0] // BLOCK))
    (num_rows, num_blocks), num_cols = factors[0].shape, factors[1].shape[0]
    if d is None:
        dtype = torch.float32 if c is None else c.dtype
        d = factors[0].new_empty((len(ks), num_rows, num_cols), dtype=dtype)
    for group, (first, end) in enumerate(k_ranges(ks, num_blocks * BLOCK)):
        blocks = slice(first // BLOCK, end // BLOCK)
        operands = []
        for (data, _), sf in zip((a, b), factors):
            num_rows = sf.shape[0]
            if data.ndim == 2:
                part = data[:, first:end]
            else:
                part = data[first * num_rows : end * num_rows].view(num_rows, end - first)
            operands += [part, sf[:, blocks]]
        product = fp8_product(*operands)
        d[group] = (product if c is None else product + c[group].float()).to(d.dtype)
    return d
