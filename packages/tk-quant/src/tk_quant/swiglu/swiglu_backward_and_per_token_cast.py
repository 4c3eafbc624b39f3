"""swiglu_backward_and_per_token_cast: backward of SwiGLU from a quantized input, its result quantized, in one pass.

For each position p and channel j, with l and r the dequantized x[p, j] and x[p, hidden + j], g = grad_out[p, j] and
w = weight.flat[pos_to_token_topk[p]], in float32, products from left to right:

    d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
    out = a * w;  dl = gs * r * fma(l, 1 - s, 1);  dr = gs * l;  weight_grad.flat[pos_to_token_topk[p]] = sum of g * a

x_grad = [dl | dr] comes out in bfloat16 and, quantized from float32 by groups of num_per_channels channels, in e4m3.

A thread takes `vec` neighbouring channels of both halves of a row; the lanes that hold a group agree on its two amax by
shuffles. A thread block looks up its rows' indices, then works on `rows` rows at a time and loads the next ones
meanwhile. It sums g * a over each row in shared memory, in a fixed order:

              left half of x, of x_grad      right half                      grad_out, out
            ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐
     rows   │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │
            └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘

Threads then look for pairs of a token and an expert that have no row, and write a gradient of 0 for them. Rows of
padding are not read. Instruction throughput is a limit beside bandwidth: lib/division.py saves instructions.
"""

import math

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.views import flat
from tk_quant.lib.check_pairs import pair_of
from tk_quant.lib.least_amax import check_sf_clamp_min, least_amax_of
from tk_quant.lib.swiglu_arguments import check_clamp_value, check_maps_agree
from tk_quant.lib.swiglu_backward_and_per_token_cast_kernel import SwigluBackwardConfig, swiglu_backward_kernel

_GROUPS = (32, 128)
# Pair indices are int32, and in the last thread block they go a little past the last pair.
_MAX_PAIRS = 2**31 - 2**10


@op(
    "tk_quant::swiglu_backward_and_per_token_cast_out",
    mutates=("out", "x_grad_data", "x_grad_sf", "x_grad", "weight_grad"),
    reference="swiglu_backward_and_per_token_cast",
    translate=lambda call: {"x": (call.data, call.sf)},
)
def _swiglu_backward_and_per_token_cast_out(
    data: Tensor,
    sf: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    out: Tensor,
    x_grad_data: Tensor,
    x_grad_sf: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
) -> None:
    hidden, num_pairs, num_positions = grad_out.shape[-1], weight.numel(), pos_to_token_topk.numel()
    if num_positions == 0:
        weight_grad.zero_()
        return
    arch, clamps = get_arch(data.device), swiglu_clamp_value is not None
    config = SwigluBackwardConfig.best(hidden, num_per_channels, arch)
    turns = config.turns_of(num_positions, get_num_sms(data.device))
    alignments = check.row_alignment(data), check.row_alignment(grad_out)
    data, sf, grad_out, out, x_grad_data, x_grad_sf, x_grad = (
        flat(each, 1) for each in (data, sf, grad_out, out, x_grad_data, x_grad_sf, x_grad)
    )
    swiglu_backward_kernel(alignments, hidden, num_per_channels, round_sf, clamps, config, arch)(
        *(data, sf, grad_out, weight, pos_to_token_topk, token_topk_to_pos),
        *(out, x_grad_data, x_grad_sf, x_grad, weight_grad),
        0.0 if swiglu_clamp_value is None else swiglu_clamp_value,
        least_amax_of("e4m3", sf_clamp_min),
        num_pairs,
        turns,
        config.num_blocks(num_positions, turns, num_pairs),
    )


@replayable
def swiglu_backward_and_per_token_cast(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Backward of SwiGLU times a weight for each row, from a quantized input; the forward is computed again.

    With l and r the left and right half of a row of x = data * sf, rounded to float32, g = grad_out, and w the row's
    weight; every operation in float32 to nearest with ties to even, products from left to right, fma rounded once:

        d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
        out = a * w;  x_grad = [gs * r * fma(l, 1 - s, 1) | gs * l];  weight_grad = sum of g * a over the row

    and for each group of num_per_channels channels of x_grad, before it is rounded to bfloat16,

        amax = max(max |x_grad|, 1e-4);  sf = amax / 448;  data = round(x_grad * (448 / amax))
        with round_sf: sf = least power of two >= amax / 448;  data = round(x_grad / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. All
    results are exact but weight_grad, which is summed in float32, in an order that depends only on hidden
    and num_per_channels. Names and formulas are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: `(data, sf)`: float8_e4m3fn (num_positions, 2 * hidden), the gate l in the left half, hidden a multiple of
            num_per_channels, and float32 (num_positions, 2 * hidden / num_per_channels), both contiguous. Both may be
            batched by expert, (num_experts, num_rows, ...): then num_positions is num_experts * num_rows, and position
            p is row p % num_rows of expert p // num_rows.
        grad_out: bfloat16 (num_positions, hidden), or (num_experts, num_rows, hidden) as x; contiguous.
        weight: float32 (num_tokens, num_topk), contiguous.
        pos_to_token_topk: int32 (num_positions,), or (num_experts, num_rows) as x: index of each row's weight, flat. A
            row where it is negative or past the end is padding: it is not read, out and x_grad are 0 there, and sf is
            that of a group of zeros.
        token_topk_to_pos: int32 (num_tokens, num_topk), the position of each pair of a token and an expert; negative
            where it has none. weight_grad is 0 for these, and for any whose position is not inside x or has another
            pair in pos_to_token_topk. `TK_DEBUG=1` raises ValueError for indices past the end and for maps that
            disagree.
        num_per_channels: Channels of a group, of x and of x_grad: 32 or 128.
        round_sf: Round sf up to a power of two.
        swiglu_clamp_value: c, 2**-126 to infinity: first l is clamped to at most c, and r to [-c, c]; x_grad is 0 at
            clamped elements. NaN stays NaN.
        sf_clamp_min: The least amax instead of 1e-4; at least 448 * 2**-126. Gradients, which may be tiny, need it.

    Returns:
        `(out, (data, sf), x_grad, weight_grad)`: out bfloat16, shaped like grad_out; data float8_e4m3fn and sf float32,
        shaped like x; x_grad bfloat16, shaped like data; weight_grad float32 (num_tokens, num_topk).

    Raises:
        TypeError: An argument is not a tensor, number or flag as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    data, sf = pair_of("x", x)
    batched = isinstance(data, Tensor) and data.ndim == 3
    names = ("num_experts", "num_rows") if batched else ("num_positions",)
    *leading, width = check.tensor("x[0]", data, (torch.float8_e4m3fn,), (*names, "2 * hidden"))
    device = data.device
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, _GROUPS)
    channels = 2 * num_per_channels
    check.require(width > 0 and width % channels == 0, "x[0]", "a positive multiple of {} columns", width, channels)
    hidden, sf_shape = width // 2, (*leading, width // num_per_channels)
    check.tensor("x[1]", sf, (torch.float32,), sf_shape, device=device)
    check.tensor("grad_out", grad_out, (torch.bfloat16,), (*leading, hidden), device=device)
    pairs = check.tensor("weight", weight, (torch.float32,), ("num_tokens", "num_topk"), device=device)
    check.require(weight.numel() <= _MAX_PAIRS, "weight", f"at most {_MAX_PAIRS} elements", weight.numel())
    check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), tuple(pairs), device=device)
    is_flat = not (batched and isinstance(pos_to_token_topk, Tensor) and pos_to_token_topk.ndim == 2)
    positions = (math.prod(leading),) if is_flat else tuple(leading)
    check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), positions, device=device)
    check.flag("round_sf", round_sf)
    check_clamp_value(swiglu_clamp_value)
    check_sf_clamp_min(sf_clamp_min, "e4m3")
    if check.reads_data(data):  # the two maps must stay inside each other and agree
        num_positions, num_pairs = pos_to_token_topk.numel(), token_topk_to_pos.numel()
        check.below("pos_to_token_topk", pos_to_token_topk, num_pairs, "indices below {}")
        check.below("token_topk_to_pos", token_topk_to_pos, num_positions, "indices below {}")
        check_maps_agree(pos_to_token_topk, token_topk_to_pos)

    x_grad_data, x_grad_sf = torch.empty_like(data), torch.empty_like(sf)
    out, x_grad = torch.empty_like(grad_out), grad_out.new_empty((*leading, width))
    weight_grad = torch.empty_like(weight)
    _swiglu_backward_and_per_token_cast_out(
        *(data, sf, grad_out, weight, pos_to_token_topk if is_flat else pos_to_token_topk.view(-1), token_topk_to_pos),
        *(out, x_grad_data, x_grad_sf, x_grad, weight_grad),
        *(num_per_channels, round_sf, swiglu_clamp_value, sf_clamp_min),
    )
    return out, (x_grad_data, x_grad_sf), x_grad, weight_grad
