"""References of the products of rows grouped by expert."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tk_core.math import align
from tk_core.reference.quantize import encode_e4m3, quantization_factors
from tk_core.reference.scales import pack_scales
from tk_core.scales import LIMITS, ScaleLayout
from tk_gemm.check import BLOCK, Pair, Recipe, SideRecipe
from tk_gemm.reference.products import bf16_product, fp8_product


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> Tensor:
    """D[r] = A[r]·B[group of r]ᵀ, zeros in rows of no group. See tk_gemm.m_grouped_fp8_gemm_nt_contiguous."""
    (data, sf), (b_data, b_sf) = a, b
    num_groups, num_cols, _ = b_data.shape
    if d is None:
        d = data.new_empty((data.shape[0], num_cols), dtype=torch.bfloat16)
    d.zero_()
    for group, rows in _rows_of_groups(grouped_layout, data.shape[0], num_groups, use_psum_layout):
        # Rows are selected as bytes: not every device can index float8.
        selected = data.view(torch.uint8)[rows].view(data.dtype)
        d[rows] = fp8_product(selected, sf[rows], b_data[group], b_sf[group]).to(d.dtype)
    return d


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """D[g, r] = A[g, r]·B[g]ᵀ for r < masked_m[g]; other rows stay. See tk_gemm.m_grouped_fp8_gemm_nt_masked."""
    (data, sf), (b_data, b_sf) = a, b
    num_groups, max_m, _ = data.shape
    if d is None:
        d = data.new_empty((num_groups, max_m, b_data.shape[1]), dtype=torch.bfloat16)
    for group, count in enumerate(masked_m.clamp(0, max_m).tolist()):
        d[group, :count] = fp8_product(data[group, :count], sf[group, :count], b_data[group], b_sf[group]).to(d.dtype)
    return d


def m_grouped_fp8_gemm_swiglu_nt_contiguous(
    a: Pair,
    b: Pair,
    grouped_layout: Tensor,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    use_psum_layout: bool = False,
) -> Pair:
    """SwiGLU and cast of the grouped product. See tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous."""
    (data, sf), (b_data, b_sf) = a, b
    num_rows, (num_groups, num_cols, _) = data.shape[0], b_data.shape
    out = torch.zeros((num_rows, num_cols // 2), dtype=torch.float32, device=data.device)
    is_real = torch.zeros(num_rows, dtype=torch.bool, device=data.device)
    for group, rows in _rows_of_groups(grouped_layout, num_rows, num_groups, use_psum_layout):
        selected = data.view(torch.uint8)[rows].view(data.dtype)
        product = fp8_product(selected, sf[rows], b_data[group], b_sf[group])
        runs = product.view(rows.numel(), num_cols // (2 * BLOCK), 2, BLOCK)
        gate, up = runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)
        if swiglu_clamp_value is not None:
            gate = gate.clamp(max=swiglu_clamp_value)
            up = up.clamp(-swiglu_clamp_value, swiglu_clamp_value)
        out[rows] = gate / (1 + torch.exp(-gate)) * up
        is_real[rows] = True
    if pos_to_token_topk is not None and topk_weights is not None:
        pairs = pos_to_token_topk.long()
        is_real &= (pairs >= 0) & (pairs < topk_weights.numel())
        weights = torch.cat([topk_weights.flatten(), topk_weights.new_zeros(1)])
        out = out * weights[torch.where(is_real, pairs, topk_weights.numel())].unsqueeze(1)
    is_padding, is_packed = ~is_real.unsqueeze(1), sf.dtype is torch.int32
    blocks = out.masked_fill(is_padding, 0).unflatten(1, (num_cols // (2 * BLOCK), BLOCK))
    factors, scale = quantization_factors(blocks.abs().amax(dim=2), "e4m3", is_packed, LIMITS["e4m3"][1])
    layout = ScaleLayout.PACKED_UE8M0 if is_packed else ScaleLayout.COL_MAJOR
    codes = encode_e4m3(blocks * scale.unsqueeze(2)).flatten(1)
    return codes, pack_scales(factors.masked_fill(is_padding, 0), layout)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> Tensor:
    """D[r] = A[r]·B[group of r]ᵀ, zeros in rows of no group. See tk_gemm.m_grouped_bf16_gemm_nt_contiguous."""
    num_groups, num_cols, _ = b.shape
    if d is None:
        d = a.new_empty((a.shape[0], num_cols))
    d.zero_()
    for group, rows in _rows_of_groups(grouped_layout, a.shape[0], num_groups, use_psum_layout):
        d[rows] = bf16_product(a[rows], b[group]).to(d.dtype)
    return d


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor | None, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> Tensor:
    """D[g, r] = A[g, r]·B[g]ᵀ for r < masked_m[g]; other rows stay. See tk_gemm.m_grouped_bf16_gemm_nt_masked."""
    num_groups, max_m, _ = a.shape
    if d is None:
        d = a.new_empty((num_groups, max_m, b.shape[1]))
    for group, count in enumerate(masked_m.clamp(0, max_m).tolist()):
        d[group, :count] = bf16_product(a[group, :count], b[group]).to(d.dtype)
    return d


def _rows_of_groups(
    grouped_layout: Tensor, num_rows: int, num_groups: int, use_psum_layout: bool
) -> Iterator[tuple[int, Tensor]]:
    """`(group, its rows)` of the groups that have rows; rows are int64 indices."""
    ids, first = grouped_layout, 0
    if use_psum_layout:
        ids = grouped_layout.new_full((num_rows,), -1)
        for group, end in enumerate(grouped_layout.clamp(min=0).tolist()):
            ids[first:end] = group
            first = align(end, BLOCK)
    for group in range(num_groups):
        rows = (ids == group).nonzero().flatten()
        if rows.numel():
            yield group, rows
