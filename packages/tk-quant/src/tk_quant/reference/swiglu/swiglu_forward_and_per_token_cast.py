"""Reference of swiglu_forward_and_per_token_cast."""

import torch

from tk_core.reference.scales import pack_scales
from tk_core.scales import scale_layout
from tk_quant.reference.lib.cast import block_amax, quantization_factors
from tk_quant.reference.lib.formats import FORMATS, expand_blocks
from tk_quant.reference.lib.swiglu import count_clamped, position_weights, real_positions, swiglu_forward


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    use_swizzled_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.swiglu_forward_and_per_token_cast. Data and sf of padding rows are 0; no other sf is 0."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    num_positions, hidden = x.shape[0], x.shape[1] // 2
    is_real = real_positions(num_positions, pos_to_token_topk, topk_weights, pos_to_expert, x.device)
    weight = None
    if pos_to_token_topk is not None:
        weight = position_weights(pos_to_token_topk, topk_weights, is_real)
    if clamped_count is not None:
        clamped_count += count_clamped(x, swiglu_clamp_value, is_real)
    values = swiglu_forward(x, swiglu_clamp_value, weight=weight)

    format = FORMATS[fmt]
    block_size = (1, num_per_channels or hidden)
    sf, factor = quantization_factors(block_amax(values, block_size), format, round_sf, sf_clamp_min)
    data = format.encode(expand_blocks(factor, block_size, num_positions, hidden) * values)
    data.view(torch.uint8)[~is_real] = 0
    sf[~is_real] = 0
    return data, pack_scales(sf, layout)
