"""Reference of m_grouped_fp8_gemm_swiglu_nt_contiguous."""

import torch

from tk_core.reference.scales import pack_scales
from tk_core.scales import ScaleLayout
from tk_gemm.reference.lib.groups import rows_of_groups
from tk_gemm.reference.lib.products import BLOCK, fp8_product, weight_factors

_LARGEST = 448.0
_LEAST_AMAX = 1e-4


def m_grouped_fp8_gemm_swiglu_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    grouped_layout: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    use_psum_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU and cast of the grouped product. See tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous."""
    (data, sf), (b_data, b_sf) = a, b
    num_rows, (num_groups, num_cols, _) = data.shape[0], b_data.shape
    out = torch.zeros((num_rows, num_cols // 2), dtype=torch.float32, device=data.device)
    is_real = torch.zeros(num_rows, dtype=torch.bool, device=data.device)
    for group, rows in rows_of_groups(grouped_layout, num_rows, num_groups, use_psum_layout):
        selected = data.view(torch.uint8)[rows].view(data.dtype)
        product = fp8_product(selected, sf[rows], b_data[group], weight_factors(b_sf[group], num_cols))
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
    blocks = out.unflatten(1, (num_cols // (2 * BLOCK), BLOCK))
    amax = blocks.abs().amax(dim=2).clamp(min=_LEAST_AMAX)
    # A tensor, as torch on CUDA divides by a number through its reciprocal.
    largest = torch.full_like(amax, _LARGEST)
    factors, scale, layout = amax / largest, largest / amax, ScaleLayout.COL_MAJOR
    if sf.dtype is torch.int32:
        factors, layout = _least_power_of_two(factors), ScaleLayout.PACKED_UE8M0
        scale = 1 / factors
    values = (blocks * scale.unsqueeze(2)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    codes = values.flatten(1).view(torch.uint8).masked_fill(~is_real.unsqueeze(1), 0)
    factors = factors.masked_fill(~is_real.unsqueeze(1), 0)
    return codes.view(torch.float8_e4m3fn), pack_scales(factors, layout)


def _least_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least x, a positive normal number; infinity and NaN stay."""
    mantissa, exponent = torch.frexp(x)  # mantissa from 0.5 to below 1
    power = torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(x.isfinite(), power, x)
