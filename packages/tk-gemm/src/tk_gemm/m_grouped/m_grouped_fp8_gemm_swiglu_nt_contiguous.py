"""m_grouped_fp8_gemm_swiglu_nt_contiguous: an expert's first product, SwiGLU, and the cast to e4m3, in one pass.

    [l | r] = a[row] · b[group of row]ᵀ  in float32;  out = l / (1 + exp(-l)) * r * weight
    for each 128 channels of a row:  amax = max(max |out|, 1e-4);  sf = amax / 448;  data = e4m3(out * (448 / amax))
    with packed factors:             sf = the least power of two that is at least amax / 448;  data = e4m3(out / sf)

The same as `m_grouped_fp8_gemm_nt_contiguous` and `tk_quant.swiglu_forward_and_per_token_cast` but for the rounding of
the product to bfloat16 between them, which does not happen here.
"""

import torch

from tk_core import check
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales
from tk_gemm.lib.archs import arch_of_factors
from tk_gemm.lib.fp8_product_config import WIDE
from tk_gemm.lib.fp8_swiglu_product import fp8_swiglu_product_kernel
from tk_gemm.lib.fp8_swiglu_product_blackwell import fp8_swiglu_product_blackwell_kernel
from tk_gemm.lib.groups import INT32, check_grouped_layout
from tk_gemm.lib.operands import BLOCK, FACTORS, FLOAT32, fp8_a, fp8_weights, positive_multiple
from tk_gemm.lib.tma import for_tma, takes_tma

Pair = tuple[torch.Tensor, torch.Tensor]


@op(aligned=(), min_sm=90)
def m_grouped_fp8_gemm_swiglu_nt_contiguous(
    a: Pair,
    b: Pair,
    grouped_layout: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    use_psum_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each row with the weights of its group, apply SwiGLU and quantize by groups of 128 channels.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, K) and float32 (M, K/128), on Blackwell int32 (M, ⌈K/512⌉), as
            `m_grouped_fp8_gemm_nt_contiguous` takes them.
        b: `(data, sf)`: float8_e4m3fn (G, 2 · I, K), I a multiple of 128, rows in the order of
            `interleave_gate_and_up`; sf (G, 2 · I / 128, K/128) of a's dtype.
        grouped_layout: int32 (M), or with use_psum_layout (G), as `m_grouped_fp8_gemm_nt_contiguous` takes it.
        pos_to_token_topk: int32 (M), index of each row's weight in topk_weights, flat; a row where it is negative or
            past the end is padding.
        topk_weights: float32 (num_tokens, num_topk), contiguous; with pos_to_token_topk only, and the other way round.
        swiglu_clamp_value: c, positive: l is clamped to at most c first, r to [-c, c].
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.

    Returns:
        `(data, sf)`: float8_e4m3fn (M, I), and float32 (M, I/128), or int32 (M, ⌈I/512⌉) where a's factors are packed,
        with strides (1, align(M, 4)), as the next product takes them. Both are 0 in padding rows, but unspecified where
        128 rows, from a multiple of 128 on, have no group; so are bytes of sf past I/128.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, or with TK_DEBUG=1 the
            values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    a_data, a_sf, num_rows, num_channels = fp8_a(a, FACTORS)
    device = a_data.device
    b_data, b_sf = fp8_weights(b, num_channels, device, "G", a_sf.dtype)
    num_groups, num_cols, _ = b_data.shape
    positive_multiple("b[0] (2 * I)", num_cols, 2 * BLOCK)
    check_grouped_layout(grouped_layout, num_rows, num_groups, use_psum_layout, device)
    if (pos_to_token_topk is None) is not (topk_weights is None):
        missing = "topk_weights" if topk_weights is None else "pos_to_token_topk"
        raise ValueError(f"{missing}: expected a tensor beside the other of the two, got None")
    if pos_to_token_topk is not None:
        check.tensor("pos_to_token_topk", pos_to_token_topk, INT32, (num_rows,), device=device)
        check.tensor("topk_weights", topk_weights, FLOAT32, ("num_tokens", "num_topk"), device=device)
    if swiglu_clamp_value is not None:
        check.number("swiglu_clamp_value", swiglu_clamp_value, at_least=2.0**-126)
        swiglu_clamp_value = float(swiglu_clamp_value)
    inner = num_cols // 2
    data = new(a_data.new_empty, (num_rows, inner))
    sf_layout = ScaleLayout.COL_MAJOR if a_sf.dtype is torch.float32 else ScaleLayout.PACKED_UE8M0
    sf = new(empty_scales, a_data, num_rows, inner // BLOCK, sf_layout)
    if not launching(data, sf):
        return data, sf
    arch = arch_of_factors("tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous", a_sf)
    if topk_weights is not None and not topk_weights.numel():  # No row has a weight.
        data.zero_()
        sf.zero_()
        return data, sf
    # Tiles of both kernels are 128 × 256: 128 columns of the gate and 128 of up.
    num_tiles = ceil_div(num_rows, WIDE.block_m) * ceil_div(num_cols, WIDE.block_n)
    kind, with_clamp = "psum" if use_psum_layout else "ids", swiglu_clamp_value is not None
    rows, rows_sf, weights = for_tma(a_data.unsqueeze(0)), a_sf.unsqueeze(0).mT, for_tma(b_data)
    factors = for_tma(rows_sf)
    maps = (grouped_layout, pos_to_token_topk, None if topk_weights is None else topk_weights.view(-1))
    others = (swiglu_clamp_value or 0.0, min(num_tiles, get_num_sms(device)))
    if arch.has_tcgen05:
        launch = fp8_swiglu_product_blackwell_kernel(kind, topk_weights is not None, with_clamp, arch)
        launch(rows, factors, weights, b_sf.mT, *maps, data, sf.mT.view(torch.uint8), *others)
    else:
        by_tma = takes_tma(factors)
        launch = fp8_swiglu_product_kernel(kind, by_tma, topk_weights is not None, with_clamp, arch)
        weights_sf, codes = b_sf.contiguous().view(-1), for_tma(data.unsqueeze(0))
        launch(rows, factors if by_tma else rows_sf, weights, weights_sf, *maps, codes, sf.mT, *others)
    return data, sf
