"""References of the BF16 products of rows grouped by expert."""

import torch

from tk_gemm.reference.lib.groups import rows_of_groups
from tk_gemm.reference.lib.products import bf16_product


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """D[r] = A[r]·B[group of r]ᵀ, zeros in rows of no group. See tk_gemm.m_grouped_bf16_gemm_nt_contiguous."""
    num_groups, num_cols, _ = b.shape
    if d is None:
        d = a.new_empty((a.shape[0], num_cols))
    d.zero_()
    for group, rows in rows_of_groups(grouped_layout, a.shape[0], num_groups, use_psum_layout):
        d[rows] = bf16_product(a[rows], b[group]).to(d.dtype)
    return d


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """`m_grouped_bf16_gemm_nt_contiguous` of b (G, K, N)."""
    return m_grouped_bf16_gemm_nt_contiguous(
        a,
        b.transpose(1, 2),
        d,
        grouped_layout,
        compiled_dims,
        use_psum_layout,
        ensure_zero_padding,
        expected_m_for_psum_layout,
    )
