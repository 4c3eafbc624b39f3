"""Reference of k_grouped_bf16_gemm_tn_contiguous."""

import torch

from tk_gemm.reference.lib.groups import k_ranges
from tk_gemm.reference.lib.products import bf16_product


def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    ks: list[int] | torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
) -> torch.Tensor:
    """D[g] = A_gᵀ·B_g + C[g] over the group's rows. See tk_gemm.k_grouped_bf16_gemm_tn_contiguous."""
    if d is None:
        d = a.new_empty((len(ks), a.shape[1], b.shape[1]), dtype=torch.float32 if c is None else c.dtype)
    for group, (first, end) in enumerate(k_ranges(ks, a.shape[0])):
        product = bf16_product(a[first:end].t(), b[first:end].t())
        d[group] = (product if c is None else product + c[group].float()).to(d.dtype)
    return d
