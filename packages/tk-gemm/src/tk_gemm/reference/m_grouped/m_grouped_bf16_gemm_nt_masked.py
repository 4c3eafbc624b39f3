"""Reference of m_grouped_bf16_gemm_nt_masked."""

import torch

from tk_gemm.reference.lib.products import bf16_product


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D[g, r] = A[g, r]·B[g]ᵀ for r < masked_m[g]; other rows stay. See tk_gemm.m_grouped_bf16_gemm_nt_masked."""
    num_groups, max_m, _ = a.shape
    if d is None:
        d = a.new_empty((num_groups, max_m, b.shape[1]))
    for group, count in enumerate(masked_m.clamp(0, max_m).tolist()):
        d[group, :count] = bf16_product(a[group, :count], b[group]).to(d.dtype)
    return d
