"""swiglu_forward_and_per_token_cast: SwiGLU, a weight for each row, and the cast by groups of channels, in one pass.

For each position p and channel j, with l = x[p, j] and r = x[p, hidden + j], in float32, left to right:

    out = l / (1 + exp(-l)) * r * topk_weights.flat[pos_to_token_topk[p]]       (the weight where there are any)

and out is quantized by groups of num_per_channels channels as in per_token_cast; it is not rounded in between.
x (num_positions, 2 * hidden), bfloat16 or float32; data e4m3 (num_positions, hidden) or e2m1 (…, hidden / 2).

A thread takes `vec` neighbouring channels of both halves of a row. A group is owned by neighbouring lanes of one warp,
which agree on amax by shuffles; the lanes of four groups assemble a word of packed sf, also by shuffles:

               left half of x                 right half                     hidden 2048, vec 16: 128 lanes
            ┌─────────┬─────────┬─  ─┐    ┌─────────┬─────────┬─  ─┐
    rows    │ l0 … l7 │ l8… l15 │ …  │    │ l0 … l7 │ l8… l15 │ …  │         lanes  0 … 7   8 … 15   16 … 23 …
            │         │         │    │    │         │         │    │         group     0       1         2
            └─────────┴─────────┴─  ─┘    └─────────┴─────────┴─  ─┘

If a group's lanes are no power of two or more than a warp, the group is a whole row, and a thread block takes it.
Rows of padding are not read, and not written except zeros in swizzled sf. A thread waits for its row's index and then
for 64 bytes of x, so as many threads as possible have to fit on an SM: registers are capped. lib/division.py keeps the
kernel bound by memory.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.math import align
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.lib.cast_formats import CastInput, CastScales, flags_of, layout_of
from tk_quant.lib.least_amax import check_sf_clamp_min, least_amax_of
from tk_quant.lib.quantize import BITS
from tk_quant.lib.swiglu_arguments import check_clamp_value, check_row_maps
from tk_quant.lib.swiglu_forward_and_per_token_cast_kernel import SwigluCastConfig, swiglu_cast_kernel
from tk_quant.swiglu.swiglu_forward import Given

_DTYPES = (torch.bfloat16, torch.float32)
_FORMATS = ("e4m3", "e2m1")
_GROUPS = (32, 128)
_ROWS_OF_SWIZZLED_TILE = 128


@op(
    "tk_quant::swiglu_forward_and_per_token_cast_out",
    mutates=("data", "sf", "clamped_count"),
    reference="swiglu_forward_and_per_token_cast",
    translate=lambda call: flags_of(call.sf),
)
def _swiglu_forward_and_per_token_cast_out(
    x: Tensor,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    data: Tensor,
    sf: Tensor,
    clamped_count: Tensor | None,
    fmt: str,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
) -> None:
    num_positions, hidden = x.shape[0], x.shape[1] // 2
    if num_positions == 0:
        return
    arch = get_arch(x.device)
    source, scales = CastInput(x.dtype, check.row_alignment(x)), CastScales(layout_of(sf), round_sf)
    weights, experts, clamps = pos_to_token_topk is not None, pos_to_expert is not None, swiglu_clamp_value is not None
    given = Given(weights, experts, clamps, clamped_count is not None)
    config = SwigluCastConfig.best(hidden, num_per_channels, source.bits, scales.in_bytes, clamps, arch)
    num_rows = align(num_positions, _ROWS_OF_SWIZZLED_TILE) if scales.layout is ScaleLayout.SWIZZLED else num_positions
    swiglu_cast_kernel(hidden, source, fmt, num_per_channels, scales, given, config, arch)(
        x,
        0 if pos_to_token_topk is None else pos_to_token_topk,
        0 if topk_weights is None else topk_weights,
        0 if pos_to_expert is None else pos_to_expert,
        0 if clamped_count is None else clamped_count,
        data,
        sf,
        0.0 if swiglu_clamp_value is None else float(swiglu_clamp_value),
        least_amax_of(fmt, sf_clamp_min),
        config.num_blocks(num_rows, hidden),
    )


@replayable
def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    use_swizzled_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """SwiGLU of each row, times its weight where there are weights, quantized by groups of channels in the same pass.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right; max and least amax are 448 and 1e-4 for e4m3, 6 and 6 * 2**-126 for e2m1:

        out = l / (1 + exp(-l)) * r * weight;  amax = max(max |out|, least amax)
        sf = amax / max;  data = round(out * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(out / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf, and
    its data are unspecified for e2m1. Names and formulas are those of DeepSeek's TileKernels 1.0.0; groups of 32, e2m1
    and swizzled sf are not in it.

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, the gate l in the left half; hidden a multiple of 128, rows
            may be strided.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 32, 128 or hidden; 0 means hidden too.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32 (num_tokens, num_topk); with pos_to_token_topk only, and the other way round.
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Data and sf of padding rows are
            unspecified (swizzled sf: 0), and x is not read there.
        use_tma_aligned_col_major_sf: sf with strides (1, num_positions rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs the other two flags.
        swiglu_clamp_value: c, 2**-126 to infinity: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        clamped_count: int64 (3,), to which the numbers of l > c, r > c and r < -c in rows that are not padding are
            added in place. Needs swiglu_clamp_value.
        sf_clamp_min: The least amax instead of the format's; at least max * 2**-126.
        use_swizzled_sf: sf as Blackwell's block-scaled matrix products read it; needs round_sf.

    Returns:
        `(data, sf)`: data float8_e4m3fn (num_positions, hidden), or int8 (num_positions, hidden / 2) with the even
        channel in the low nibble; sf float32 (num_positions, hidden / num_per_channels), or packed int32 with a quarter
        of the columns, or swizzled float8_e8m0fnu (see tk_core.scales). Layouts other than row major are for groups of
        32 and 128.

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    check.require(round_sf or not use_swizzled_sf, "use_swizzled_sf", "False without round_sf", use_swizzled_sf)
    num_positions, width = check.tensor("x", x, _DTYPES, ("num_positions", "2 * hidden"), layout="rows")
    check.require(width > 0 and width % 256 == 0, "x", "a positive multiple of 256 columns", width)
    hidden = width // 2
    check.one_of("fmt", fmt, _FORMATS)
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden, 0))
    num_per_channels = num_per_channels or hidden
    if layout is not ScaleLayout.ROW_MAJOR and num_per_channels not in _GROUPS:
        check.require(False, "num_per_channels", f"32 or 128 for sf in layout {layout.name}", num_per_channels)
    check_row_maps(x, pos_to_token_topk, topk_weights, pos_to_expert)
    check_clamp_value(swiglu_clamp_value)
    if clamped_count is not None:
        check.require(swiglu_clamp_value is not None, "swiglu_clamp_value", "a number beside clamped_count", None)
        check.tensor("clamped_count", clamped_count, (torch.int64,), (3,), device=x.device)
    check_sf_clamp_min(sf_clamp_min, fmt)
    data_dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.int8
    data = x.new_empty((num_positions, hidden * BITS[fmt] // 8), dtype=data_dtype)
    sf = empty_scales(x, num_positions, hidden // num_per_channels, layout)
    _swiglu_forward_and_per_token_cast_out(
        *(x, pos_to_token_topk, topk_weights, pos_to_expert, data, sf, clamped_count),
        *(fmt, num_per_channels, round_sf, swiglu_clamp_value, sf_clamp_min),
    )
    return data, sf
