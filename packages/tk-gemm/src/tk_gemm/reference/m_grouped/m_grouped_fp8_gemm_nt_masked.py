"""Reference of m_grouped_fp8_gemm_nt_masked."""

import torch

from tk_gemm.reference.lib.products import fp8_product, weight_factors


def m_grouped_fp8_gemm_nt_masked(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D[g, r] = A[g, r]·B[g]ᵀ for r < masked_m[g]; other rows stay. See tk_gemm.m_grouped_fp8_gemm_nt_masked."""
    (data, sf), (b_data, b_sf) = a, b
    num_groups, max_m, _ = data.shape
    num_cols = b_data.shape[1]
    if d is None:
        d = data.new_empty((num_groups, max_m, num_cols), dtype=torch.bfloat16)
    for group, count in enumerate(masked_m.clamp(0, max_m).tolist()):
        factors = weight_factors(b_sf[group], num_cols)
        d[group, :count] = fp8_product(data[group, :count], sf[group, :count], b_data[group], factors).to(d.dtype)
    return d
