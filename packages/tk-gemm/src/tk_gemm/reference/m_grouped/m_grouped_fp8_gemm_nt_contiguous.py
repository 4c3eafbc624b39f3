"""References of the FP8 products of rows grouped by expert."""

import torch

from tk_gemm.reference.lib.groups import rows_of_groups
from tk_gemm.reference.lib.products import fp8_product, weight_factors


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """D[r] = A[r]·B[group of r]ᵀ, zeros in rows of no group. See tk_gemm.m_grouped_fp8_gemm_nt_contiguous."""
    (data, sf), (b_data, b_sf) = a, b
    num_groups, num_cols, _ = b_data.shape
    if d is None:
        d = data.new_empty((data.shape[0], num_cols), dtype=torch.bfloat16)
    d.zero_()
    for group, rows in rows_of_groups(grouped_layout, data.shape[0], num_groups, use_psum_layout):
        # Rows are selected as bytes: not every device can index float8.
        selected = data.view(torch.uint8)[rows].view(data.dtype)
        factors = weight_factors(b_sf[group], num_cols)
        d[rows] = fp8_product(selected, sf[rows], b_data[group], factors).to(d.dtype)
    return d


def m_grouped_fp8_gemm_nn_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """`m_grouped_fp8_gemm_nt_contiguous` of b (G, K, N)."""
    b = (b[0].transpose(1, 2), b[1].transpose(1, 2))
    return m_grouped_fp8_gemm_nt_contiguous(
        a,
        b,
        d,
        grouped_layout,
        recipe,
        recipe_a,
        recipe_b,
        compiled_dims,
        disable_ue8m0_cast,
        use_psum_layout,
        ensure_zero_padding,
        expected_m_for_psum_layout,
    )
