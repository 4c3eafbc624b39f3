"""SwiGLU in plain PyTorch, alone and with a cast of its results. For any device."""

from typing import NamedTuple

import torch
from torch import Tensor

from tk_core.reference.fma import fma
from tk_core.reference.scales import pack_scales
from tk_core.scales import ScaleLayout, scale_layout
from tk_quant.cast.format import OUT_DTYPES
from tk_quant.reference.formats import dequantize
from tk_quant.reference.quantizer import cast
from tk_quant.reference.transpose import transpose

_ROWS = 2**16
_BF16_NAN_BITS = 0x7FFF
_GELU = float.fromhex("0x1.988454p0"), float.fromhex("0x1.2444F2p-4"), float.fromhex("0x1.B6676Cp-3")
"""The float32 k1 = 2 * sqrt(2 / pi) and k2 = 0.044715 * k1, and 3 * k2 rounded to float32."""
_GELU_CUT = 16.0
_ALPHA_OF_OAI = 1.702


class Gating(NamedTuple):
    """What the gate l and the value r of a channel become, and where x has them: arguments of the SwiGLU ops."""

    clamp: float | None = None
    activation: str = "silu"
    alpha: float | None = None
    interleaved: bool = False
    gated: bool = True
    clamp_after: bool = False

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """l and r of x in float32; without r None."""
        x = x.to(torch.float32)
        if not self.gated:
            return x, None
        return (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)

    def joined(self, gate: Tensor, value: Tensor | None) -> Tensor:
        """The opposite of `halves`."""
        if value is None:
            return gate
        return torch.stack((gate, value), dim=-1).flatten(-2) if self.interleaved else torch.cat((gate, value), dim=-1)

    def clamped(self, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """l cut to (-inf, c], unless its activation is to be cut, and r to [-c, c]; for swiglu_oai r is r + 1 then."""
        if self.clamp is not None:
            gate = gate if self.clamp_after else gate.clamp(max=self.clamp)
            value = None if value is None else value.clamp(min=-self.clamp, max=self.clamp)
        return gate, value + 1 if self.activation == "swiglu_oai" and value is not None else value

    def exponents(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        """z, where the activation is l / (1 + exp(-z)), and u * z', as the gradient has it."""
        if self.activation == "gelu_tanh":
            linear, cubic, slope = _GELU
            cut = gate.clamp(-_GELU_CUT, _GELU_CUT)
            return cut * (linear + cubic * (cut * cut)), cut * (linear + slope * (cut * cut))
        alpha = _ALPHA_OF_OAI if self.activation == "swiglu_oai" and self.alpha is None else self.alpha
        z = gate if alpha is None else alpha * gate
        return z, z

    def activated(self, gate: Tensor) -> Tensor:
        """The activation of l, before a clamp that comes after it."""
        if self.activation == "relu2":
            return _positive(gate) * _positive(gate)
        return gate / (1 + torch.exp(-self.exponents(gate)[0]))

    def is_beyond(self, gate: Tensor) -> Tensor:
        """Whether the clamp cuts l, or its activation, bool."""
        return (self.activated(gate) if self.clamp_after else gate) > self.clamp


def _positive(gate: Tensor) -> Tensor:
    """max(l, 0); NaN stays NaN, and -0 becomes 0."""
    return gate.masked_fill(gate <= 0, 0)


def float32_forward(x: Tensor, gating: Gating, *, weight: Tensor | None = None) -> Tensor:
    """The activation of l, times r, times weight, for x of any dtype, each operation rounded to float32 in this order.

    For silu it is l / (1 + exp(-l)) * r * weight for x = [l | r].
    """
    gate, value = gating.clamped(*gating.halves(x))
    out = gating.activated(gate)
    if gating.clamp_after and gating.clamp is not None:
        out = out.clamp(max=gating.clamp)
    out = out if value is None else out * value
    return out if weight is None else out * weight.unsqueeze(-1)


def float32_backward(
    x: Tensor, grad_out: Tensor, gating: Gating, *, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and gradients of out = l / (1 + exp(-z)) * (r + b) * weight, in float32.

    With d = 1 + exp(-z), s = 1 / d, g = grad_out, a = l / d * (r + b) and gs = g * weight * s, from left to right:

        out = a * weight;  dl = gs * (r + b) * fma(u * z', 1 - s, 1);  dr = gs * l;  grad of weight = sum of g * a

    where z = l and u * z' = l, or those of `Gating.exponents`. For relu2, q = max(l, 0):

        a = q * q * r;  dl = g * weight * (2 * q) * r;  dr = g * weight * (q * q)

    dl and dr are 0 where l and r were clamped. Where the activation was clamped, dl is 0 and dr = g * weight * clamp.
    Returns `(out, x_grad, weight_grad)`, with one weight for each row.
    """
    unclamped = gating.halves(x)
    gate, factor = gating.clamped(*unclamped)
    grad_out = grad_out.to(torch.float32)
    weighted = grad_out if weight is None else grad_out * weight.unsqueeze(-1)
    activated = gating.activated(gate)
    if gating.activation == "relu2":
        gate_grad = weighted * (2 * _positive(gate))
        value_grad = weighted * activated
        gate_grad = gate_grad if factor is None else gate_grad * factor
    else:
        z, product = gating.exponents(gate)
        sigmoid = torch.ones_like(gate) / (1 + torch.exp(-z))
        scaled = weighted * sigmoid
        value_grad = scaled * gate
        scaled = scaled if factor is None else scaled * factor
        gate_grad = scaled * fma(product, 1 - sigmoid, torch.ones_like(gate))
    if gating.clamp is not None:
        is_beyond = gating.is_beyond(unclamped[0])
        gate_grad = gate_grad.masked_fill(is_beyond, 0)
        if gating.clamp_after:
            activated = activated.clamp(max=gating.clamp)
            value_grad = torch.where(is_beyond, weighted * activated, value_grad)
        if factor is not None:
            value_grad = value_grad.masked_fill(unclamped[1].abs() > gating.clamp, 0)
    activated = activated if factor is None else activated * factor
    out = activated if weight is None else activated * weight.unsqueeze(-1)
    weight_grad = (grad_out.to(torch.float64) * activated.to(torch.float64)).sum(-1).to(torch.float32)
    return out, gating.joined(gate_grad, None if factor is None else value_grad), weight_grad


def count_clamped(x: Tensor, gating: Gating, is_real: Tensor | None = None) -> Tensor:
    """Numbers of l > c (or its activation), r > c, r < -c and l in x, int64 (4,); `is_real` (bool) picks the rows."""
    gate, value = gating.halves(x if is_real is None else x[is_real])
    is_beyond = gating.is_beyond(gate)
    of_value = (torch.zeros_like(is_beyond),) * 2 if value is None else (value > gating.clamp, value < -gating.clamp)
    return torch.stack([each.sum() for each in (is_beyond, *of_value, torch.ones_like(is_beyond))])


def real_positions(
    num_positions: int,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    device: torch.device,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
) -> Tensor:
    """Which positions are not padding, bool (num_positions,): indices not negative, and inside topk_weights.

    With psum_num_tokens_per_expert also in [align(psum[e - 1], token_alignment), psum[e]) for some expert e.
    """
    is_real = torch.ones(num_positions, dtype=torch.bool, device=device)
    if pos_to_token_topk is not None:
        is_real &= pos_to_token_topk >= 0
        if topk_weights is not None:
            is_real &= pos_to_token_topk < topk_weights.numel()
    if pos_to_expert is not None:
        is_real &= pos_to_expert >= 0
    if psum_num_tokens_per_expert is not None:
        ends = psum_num_tokens_per_expert.unsqueeze(1)
        begins = (ends.roll(1, 0) + token_alignment - 1) // token_alignment * token_alignment
        begins[0] = 0
        position = torch.arange(num_positions, device=device)
        is_real &= ((begins <= position) & (position < ends)).any(0)
    return is_real


def position_weights(
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor,
    is_real: Tensor,
    routed_scaling_factor: float | None = None,
) -> Tensor:
    """The weight of each position, float32; 0 for padding. Without pos_to_token_topk they are by position already."""
    weights = torch.zeros(is_real.shape, dtype=torch.float32, device=is_real.device)
    if pos_to_token_topk is None:
        weights[is_real] = topk_weights[is_real]
    else:
        weights[is_real] = topk_weights.flatten()[pos_to_token_topk[is_real].to(torch.int64)]
    return weights if routed_scaling_factor is None else weights * routed_scaling_factor


def _rows(
    x: Tensor,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    psum_num_tokens_per_expert: Tensor | None,
    token_alignment: int,
    routed_scaling_factor: float | None,
) -> tuple[Tensor, Tensor | None]:
    """`real_positions` of the rows of x, and their `position_weights`, if there are any."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real = real_positions(x.shape[0], *maps, x.device, psum_num_tokens_per_expert, token_alignment)
    if topk_weights is None:
        return is_real, None
    return is_real, position_weights(pos_to_token_topk, topk_weights, is_real, routed_scaling_factor)


def swiglu_forward(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    clamped_count: Tensor | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> Tensor:
    """See tk_quant.swiglu_forward. Rows of padding are 0."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    gating = Gating(clamp, activation, alpha, interleaved, gated, clamp_after)
    if clamped_count is not None:
        clamped_count += count_clamped(x, gating, is_real)[: clamped_count.shape[0]]
    out = float32_forward(x, gating, weight=weight)
    return out.masked_fill(~is_real.unsqueeze(1), 0).to(OUT_DTYPES[fmt])


def swiglu_backward(
    x: Tensor,
    grad_out: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    with_out: bool = False,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """See tk_quant.swiglu_backward."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    gating = Gating(clamp, activation, alpha, interleaved, gated, clamp_after)
    out, x_grad, row_grads = _in_pieces(x, grad_out, gating, weight, OUT_DTYPES[fmt])
    out, x_grad = (y.masked_fill(~is_real.unsqueeze(1), 0) for y in (out, x_grad))
    row_grads = row_grads.masked_fill(~is_real, 0)
    if routed_scaling_factor is not None:
        row_grads = row_grads * routed_scaling_factor
    weight_grad = row_grads if topk_weights is not None and topk_weights.ndim == 1 else None
    if token_topk_to_pos is not None:
        has_row = (token_topk_to_pos >= 0) & (token_topk_to_pos < x.shape[0])
        # An extra row of zero for pairs without a row.
        weight_grad = torch.cat((row_grads, row_grads.new_zeros(1)))[token_topk_to_pos.where(has_row, -1).long()]
    return out if with_out or do_recompute else None, x_grad, weight_grad


def _in_pieces(
    x: Tensor,
    grad_out: Tensor,
    gating: Gating,
    weight: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """out and x_grad in `dtype` and each row's weight gradient. In pieces, as float64 of all rows may not fit."""
    inputs = (x, grad_out) if weight is None else (x, grad_out, weight)
    pieces = []
    for part_x, part_grad, *part_weight in zip(*(each.split(_ROWS) for each in inputs)):
        weights = {"weight": part_weight[0]} if part_weight else {}
        out, x_grad, row_grads = float32_backward(part_x, part_grad, gating, **weights)
        pieces.append((out.to(dtype), x_grad.to(dtype), row_grads))
    return tuple(map(torch.cat, zip(*pieces)))


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
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor, Tensor]:
    """See tk_quant.swiglu_forward_and_per_token_cast. Data and sf of padding rows are 0; no other sf is 0."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    hidden = x.shape[1] // (2 if gated else 1)
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    gating = Gating(clamp, activation, alpha, interleaved, gated, clamp_after)
    if clamped_count is not None:
        clamped_count += count_clamped(x, gating, is_real)[: clamped_count.shape[0]]
    values = float32_forward(x, gating, weight=weight)

    block_size = (1, num_per_channels or hidden)
    data, sf = cast(values, fmt, block_size, round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    data.view(torch.uint8)[~is_real] = 0
    sf[~is_real] = 0
    return data, pack_scales(sf, layout)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See tk_quant.swiglu_forward_and_per_channel_cast_and_transpose."""
    activation = float32_forward(x, Gating(swiglu_clamp_value)).to(torch.bfloat16)
    data, sf = cast(activation, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return data if without_transpose else transpose(data), sf


def swiglu_backward_and_per_token_cast(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor | None,
    pos_to_token_topk: Tensor | None,
    token_topk_to_pos: Tensor | None,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = True,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> tuple[Tensor | None, tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """See tk_quant.swiglu_backward_and_per_token_cast."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    data, sf = (each.flatten(0, -2) for each in x)
    grad_out = grad_out.flatten(0, -2)
    pos_to_token_topk = None if pos_to_token_topk is None else pos_to_token_topk.flatten()
    leading, num_positions, block_size = x[0].shape[:-1], data.shape[0], (1, num_per_channels)
    psum = psum_num_tokens_per_expert
    all_weights = topk_weights if weight is None else weight
    is_real = real_positions(num_positions, pos_to_token_topk, all_weights, None, data.device, psum, token_alignment)
    of_rows = {}
    if all_weights is not None:
        weights = position_weights(pos_to_token_topk, all_weights, is_real, routed_scaling_factor)
        of_rows["weight"] = weights[is_real]
    values = dequantize((data[is_real], sf[is_real]), block_size)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    gating = Gating(clamp, activation, alpha, interleaved, gated, clamp_after)
    results = float32_backward(values, grad_out[is_real], gating, **of_rows)

    # Padding has the result of a row of zeros, or with psum_num_tokens_per_expert sf of 0.
    zeros = torch.zeros(1, 2 * num_per_channels, dtype=torch.float32, device=data.device)
    x_grad_data = torch.zeros_like(data)
    options = {"round_sf": round_sf, "sf_clamp_min": sf_clamp_min}
    x_grad_sf = cast(zeros, "e4m3", block_size, **options)[1][:, :1].repeat(sf.shape)
    if psum is not None:
        x_grad_sf.zero_()
    out, x_grad = (torch.zeros_like(y, dtype=torch.bfloat16) for y in (grad_out, data))
    row_grads = torch.zeros(num_positions, dtype=torch.float32, device=data.device)
    x_grad_data[is_real], x_grad_sf[is_real] = cast(results[1], "e4m3", block_size, **options)
    out[is_real], x_grad[is_real], row_grads[is_real] = _to_bf16(results[0]), _to_bf16(results[1]), results[2]
    if routed_scaling_factor is not None:
        row_grads = row_grads * routed_scaling_factor
    packed_sf = pack_scales(x_grad_sf, layout)
    if layout is ScaleLayout.ROW_MAJOR:
        packed_sf = packed_sf.unflatten(0, leading)
    return (
        out.unflatten(0, leading) if do_recompute else None,
        (x_grad_data.unflatten(0, leading), packed_sf),
        x_grad.unflatten(0, leading),
        None if all_weights is None else _weight_grad(row_grads, pos_to_token_topk, token_topk_to_pos),
    )


def _weight_grad(row_grads: Tensor, pos_to_token_topk: Tensor | None, token_topk_to_pos: Tensor | None) -> Tensor:
    """Gradients of weights, by pairs where there are maps: a pair's is that of its row, if that row is the pair's."""
    if pos_to_token_topk is None or token_topk_to_pos is None:
        return row_grads
    num_positions, pos = row_grads.shape[0], token_topk_to_pos.flatten().to(torch.int64)
    has_row = (pos >= 0) & (pos < num_positions)
    weight_grad = torch.zeros(pos.shape, dtype=torch.float32, device=pos.device)
    if num_positions:
        pos = pos.where(has_row, 0)
        has_row &= pos_to_token_topk[pos] == torch.arange(pos.numel(), device=pos.device)
        weight_grad = torch.where(has_row, row_grads[pos], weight_grad)
    return weight_grad.view(token_topk_to_pos.shape)


def _to_bf16(x: Tensor) -> Tensor:
    """Round to bfloat16, to nearest, ties to even; any NaN gets the bits that a GPU writes."""
    rounded = x.to(torch.bfloat16)
    rounded.view(torch.int16).masked_fill_(x.isnan(), _BF16_NAN_BITS)
    return rounded
