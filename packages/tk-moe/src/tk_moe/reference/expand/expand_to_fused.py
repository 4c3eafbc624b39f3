"""expand_to_fused and expand_to_fused_with_sf in plain PyTorch."""

import torch

from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout, empty_scales

# Rows are copied as integers of the same width, so that every dtype can be indexed and keeps its bits.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def expand_to_fused(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """Copy each token's row to its positions in the experts' segments; padding rows become zero.

    x (num_tokens, hidden), token_topk_to_pos int32 (num_tokens, num_topk), pos_to_expert int32 (num_expanded_tokens,);
    returns (num_expanded_tokens, hidden). Positions outside the output are ignored.
    """
    num_tokens, num_topk = token_topk_to_pos.shape
    num_expanded_tokens = pos_to_expert.shape[0]
    rows = x.view(_CARRIERS[x.dtype.itemsize])
    if num_tokens == 0:
        return rows.new_zeros((num_expanded_tokens, x.shape[1])).view(x.dtype)
    inside = (token_topk_to_pos >= 0) & (token_topk_to_pos < num_expanded_tokens)
    # Pairs without a position go to an extra row, which is cut off.
    pos = torch.where(inside, token_topk_to_pos, num_expanded_tokens).flatten().long()
    pos_to_token = pos.new_full((num_expanded_tokens + 1,), -1)
    pos_to_token[pos] = torch.arange(num_tokens, device=x.device).repeat_interleave(num_topk)
    pos_to_token = pos_to_token[:num_expanded_tokens]
    is_real = (pos_to_token >= 0) & (pos_to_expert >= 0)
    return torch.where(is_real[:, None], rows[pos_to_token.clamp(min=0)], 0).to(rows.dtype).view(x.dtype)


def expand_to_fused_with_sf(
    x: tuple[torch.Tensor, torch.Tensor],
    num_per_channels: int,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_to_fused` of a quantized pair (data, sf); sf' column major (TMA-aligned) with the flag.

    sf is row-major: float32 (num_tokens, ceil(hidden / num_per_channels)), or packed UE8M0 int32, four factors a word.
    """
    data, sf = x
    num_expanded_tokens = pos_to_expert.shape[0]
    expanded_sf = expand_to_fused(sf, token_topk_to_pos, pos_to_expert)
    if use_tma_aligned_col_major_sf:
        hidden = data.shape[1] * (1 if data.dtype == torch.float8_e4m3fn else 2)
        layout = ScaleLayout.PACKED_UE8M0 if sf.dtype == torch.int32 else ScaleLayout.COL_MAJOR
        num_sf = ceil_div(hidden, num_per_channels)
        expanded_sf = empty_scales(data, num_expanded_tokens, num_sf, layout).copy_(expanded_sf)
    return expand_to_fused(data, token_topk_to_pos, pos_to_expert), expanded_sf
