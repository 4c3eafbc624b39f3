"""expand_to_fused: copies tokens' rows to their positions in the experts' segments; _with_sf: also their scale factors.

    out[token_topk_to_pos[t, k]] = x[t]     for every position that is not negative
    out[p] = 0                              where pos_to_expert[p] < 0 (padding)

x (num_tokens, hidden), token_topk_to_pos int32 (num_tokens, num_topk), pos_to_expert int32 (num_expanded_tokens),
out (num_expanded_tokens, hidden).

One launch writes every row once. Of G thread blocks, block b loads row b of x, up to four 16-byte vectors per thread at
a time, and stores it to its positions. Then it zeroes the padding among the rows b, b + G, b + 2G, … Padding comes in
runs, at the end of each segment and after the last one: with this stride, different blocks zero the rows of a run.

    x      row b             [ thread 0 | thread 1 | … | thread 0 | … ]      each field one vector
    out    row pos[b, 0]     [ thread 0 | thread 1 | …                ]
           row pos[b, 1]     [ thread 0 | …                           ]
           …

Many long rows without scale factors move by bulk copies instead (lib/expand_to_fused_bulk_kernel.py). DRAM loses time
where reads and writes mix, so a thread block loads as much of x as a third of an SM's shared memory holds, and stores
none of it before all has arrived. All blocks get equal shares, in whole waves.

    x       pieces b, b + G, b + 2G, ... ──shared memory──> each to the same columns of the token's positions

Scale factors are copied along with their rows. In column-major order, more than a few columns would mean scattered
4-byte stores. Instead, the launch records the token of each row, and a second launch gathers the factors in tiles.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.math import ceil_div
from tk_core.num_sms import get_device_num_sms
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales
from tk_moe.lib.check_maps import check_each_once, check_experts, check_positions
from tk_moe.lib.expand_to_fused_bulk_kernel import BulkConfig, expand_bulk_kernel
from tk_moe.lib.expand_to_fused_kernel import expand_kernel, gather_factors_kernel, num_blocks_for

_E2M1_DTYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)  # two FP4 codes a byte
_QUANTIZED_DTYPES = (torch.float8_e4m3fn, *_E2M1_DTYPES)

# Dtypes that a kernel takes as they are. A tensor of any other is viewed in the carrier dtype of the same width.
_NATIVE_DTYPES = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn)
)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _as_carrier(x: Tensor) -> Tensor:
    """x itself if kernels take its dtype, else a view of it in the carrier dtype."""
    return x if x.dtype in _NATIVE_DTYPES else x.view(_CARRIERS[x.dtype.itemsize])


def _launch_expand(
    x: Tensor, sf: Tensor | None, token_topk_to_pos: Tensor, pos_to_expert: Tensor, out: Tensor, out_sf: Tensor | None
) -> None:
    arch = get_arch(x.device)
    x, out = _as_carrier(x), _as_carrier(out)
    (num_tokens, num_topk), cols, num_rows = token_topk_to_pos.shape, x.shape[1], out.shape[0]
    tensors = x, token_topk_to_pos, pos_to_expert, out
    num_blocks = num_blocks_for(num_tokens, num_rows)
    bulk = BulkConfig.best(cols * x.itemsize, arch) if BulkConfig.pays(num_tokens, num_topk, num_rows) else None
    if sf is not None:
        sf_cols = sf.shape[1]
        # Rows of up to 8 factors are not worth a second launch.
        if sf_cols > 8 and out_sf.stride(0) == 1:
            tokens = sf.new_empty((num_rows, 1), dtype=torch.int32)
            expand = expand_kernel(cols, num_topk, x.dtype, 1, torch.int32, True, arch)
            expand(*tensors, num_blocks, None, tokens)
            gather_factors_kernel(sf_cols, sf.dtype, arch)(sf, tokens, out_sf)
        else:
            expand = expand_kernel(cols, num_topk, x.dtype, sf_cols, sf.dtype, False, arch)
            expand(*tensors, num_blocks, sf, out_sf)
    elif bulk is not None:
        shares = bulk.split(num_tokens, get_device_num_sms(x.device))
        expand_bulk_kernel(cols, num_topk, x.dtype, bulk, arch)(*tensors, *shares)
    else:
        expand_kernel(cols, num_topk, x.dtype, 0, None, False, arch)(*tensors, num_blocks)


@op(aligned=("x",))
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copy each token's row to its positions in the experts' segments; padding rows become zero.

    Args:
        x: (num_tokens, hidden), any dtype of 1 to 4 bytes, contiguous.
        token_topk_to_pos: int32 (num_tokens, num_topk), as `get_fused_mapping` gives it; negative means none, and a
            position past the last row is ignored.
        pos_to_expert: int32 (num_expanded_tokens,); negative marks padding. Every other row must be the position of
            exactly one (token, slot), else its contents are unspecified (`TK_DEBUG=1` raises ValueError).

    Returns:
        (num_expanded_tokens, hidden) of x's dtype, contiguous; exactly the bits of x.

    Raises:
        TypeError: x is wider than 4 bytes an element, or a map is not int32.
        ValueError: a shape, stride or device does not fit.
    """
    if not isinstance(x, Tensor) or x.dtype.itemsize > 4:
        check.require_type(False, "x", "a torch.Tensor with 1 to 4 bytes an element", getattr(x, "dtype", type(x)))
    num_tokens, hidden = check.tensor("x", x, (x.dtype,), ("num_tokens", "hidden"))
    device = x.device
    num_expanded_tokens = check_experts(pos_to_expert, device)
    check_positions(token_topk_to_pos, num_tokens, num_expanded_tokens, device)
    check_each_once(token_topk_to_pos, pos_to_expert)
    out = new(x.new_empty, (num_expanded_tokens, hidden))
    if launching(out):
        _launch_expand(x, None, token_topk_to_pos, pos_to_expert, out, None)
    return out


@op(aligned=("x",))
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """`expand_to_fused` of a quantized pair: copy rows together with their scale factors.

    Args:
        x: (data, sf). data (num_tokens, hidden) float8_e4m3fn, or (num_tokens, hidden / 2) int8, uint8 or
            float4_e2m1fn_x2 with two e2m1 codes a byte, contiguous. sf row-major, one factor for `num_per_channels`
            channels of a row: float32 (num_tokens, C), C = ceil(hidden / num_per_channels), or packed UE8M0 int32
            (num_tokens, ceil(C / 4)).
        num_per_channels: 32 or 128.
        token_topk_to_pos, pos_to_expert: as in `expand_to_fused`.
        use_tma_aligned_col_major_sf: return sf' column-major, with strides (1, align(num_expanded_tokens, 4)).

    Returns:
        (data', sf') with num_expanded_tokens rows; in padding rows both are zero. sf' is contiguous without the flag.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride, device or flag.
    """
    check.require_type(isinstance(x, tuple | list) and len(x) == 2, "x", "a pair (data, sf)", type(x))
    data, sf = x
    num_tokens, cols = check.tensor("x[0]", data, _QUANTIZED_DTYPES, ("num_tokens", "hidden"))
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, (32, 128))
    check.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    device = data.device
    hidden = cols if data.dtype is torch.float8_e4m3fn else 2 * cols
    num_sf = ceil_div(hidden, num_per_channels)
    packed = getattr(sf, "dtype", None) is torch.int32
    sf_shape = num_tokens, ceil_div(num_sf, 4) if packed else num_sf
    check.tensor("x[1]", sf, (torch.float32, torch.int32), sf_shape, device=device)
    num_expanded_tokens = check_experts(pos_to_expert, device)
    check_positions(token_topk_to_pos, num_tokens, num_expanded_tokens, device)
    check_each_once(token_topk_to_pos, pos_to_expert)
    layout = ScaleLayout.PACKED_ROW_MAJOR if packed else ScaleLayout.ROW_MAJOR
    if use_tma_aligned_col_major_sf:
        layout = ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.COL_MAJOR
    out = new(data.new_empty, (num_expanded_tokens, cols))
    out_sf = new(empty_scales, data, num_expanded_tokens, num_sf, layout)
    if launching(out, out_sf):
        _launch_expand(data, sf, token_topk_to_pos, pos_to_expert, out, out_sf)
    return out, out_sf
