"""SwiGLU in plain PyTorch, alone and with a cast of its results. For any device."""

import torch

from tk_core.reference.fma import fma
from tk_core.reference.scales import pack_scales
from tk_core.scales import ScaleLayout, scale_layout
from tk_quant.cast.format import OUT_DTYPES
from tk_quant.reference.formats import dequantize
from tk_quant.reference.quantizer import cast
from tk_quant.reference.transpose import transpose

_ROWS = 2**16
_BF16_NAN_BITS = 0x7FFF


def halves(x: torch.Tensor, swiglu_clamp_value: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate l and value r of x (..., 2 * hidden) in float32; with a clamp value c, l to (-inf, c] and r to [-c, c]."""
    gate, value = x.to(torch.float32).chunk(2, dim=-1)
    if swiglu_clamp_value is None:
        return gate, value
    return gate.clamp(max=swiglu_clamp_value), value.clamp(min=-swiglu_clamp_value, max=swiglu_clamp_value)


def float32_forward(
    x: torch.Tensor, swiglu_clamp_value: float | None = None, *, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """l / (1 + exp(-l)) * r * weight for x = [l | r] of any dtype, each operation rounded to float32, left to right."""
    gate, value = halves(x, swiglu_clamp_value)
    out = gate / (1 + torch.exp(-gate)) * value
    return out if weight is None else out * weight.unsqueeze(-1)


def float32_backward(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward and gradients of out = l / (1 + exp(-l)) * r * weight for x = [l | r], all in float32.

    With d = 1 + exp(-l), s = 1 / d, a = l / d * r and gs = grad_out * weight * s, products from left to right:

        out = a * weight;  dl = gs * r * fma(l, 1 - s, 1);  dr = gs * l;  grad of weight = sum of grad_out * a

    dl and dr are 0 where l and r were clamped. Returns `(out, x_grad, weight_grad)`, with one weight for each row.
    """
    gate, value = halves(x, swiglu_clamp_value)
    grad_out = grad_out.to(torch.float32)
    divisor = 1 + torch.exp(-gate)
    sigmoid = torch.ones_like(divisor) / divisor
    activated = gate / divisor * value
    scaled = grad_out if weight is None else grad_out * weight.unsqueeze(-1)
    scaled = scaled * sigmoid
    gate_grad = scaled * value * fma(gate, 1 - sigmoid, torch.ones_like(gate))
    value_grad = scaled * gate
    if swiglu_clamp_value is not None:
        unclamped_gate, unclamped_value = halves(x)
        gate_grad = gate_grad.masked_fill(unclamped_gate > swiglu_clamp_value, 0)
        value_grad = value_grad.masked_fill(unclamped_value.abs() > swiglu_clamp_value, 0)
    out = activated if weight is None else activated * weight.unsqueeze(-1)
    weight_grad = (grad_out.to(torch.float64) * activated.to(torch.float64)).sum(-1).to(torch.float32)
    return out, torch.cat((gate_grad, value_grad), dim=-1), weight_grad


def count_clamped(x: torch.Tensor, swiglu_clamp_value: float, is_real: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers of l > c, r > c, r < -c and l in x = [l | r], int64 (4,); `is_real` (bool) picks the rows that count."""
    gate, value = halves(x if is_real is None else x[is_real])
    beyond = (gate > swiglu_clamp_value, value > swiglu_clamp_value, value < -swiglu_clamp_value)
    return torch.stack([each.sum() for each in (*beyond, torch.ones_like(gate, dtype=torch.bool))])


def real_positions(
    num_positions: int,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    device: torch.device,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    token_alignment: int = 128,
) -> torch.Tensor:
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
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor,
    is_real: torch.Tensor,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """The weight of each position, float32; 0 for padding. Without pos_to_token_topk they are by position already."""
    weights = torch.zeros(is_real.shape, dtype=torch.float32, device=is_real.device)
    if pos_to_token_topk is None:
        weights[is_real] = topk_weights[is_real]
    else:
        weights[is_real] = topk_weights.flatten()[pos_to_token_topk[is_real].to(torch.int64)]
    return weights if routed_scaling_factor is None else weights * routed_scaling_factor


def _rows(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    psum_num_tokens_per_expert: torch.Tensor | None,
    token_alignment: int,
    routed_scaling_factor: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`real_positions` of the rows of x, and their `position_weights`, if there are any."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real = real_positions(x.shape[0], *maps, x.device, psum_num_tokens_per_expert, token_alignment)
    if topk_weights is None:
        return is_real, None
    return is_real, position_weights(pos_to_token_topk, topk_weights, is_real, routed_scaling_factor)


def swiglu_forward(
    x: torch.Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    clamped_count: torch.Tensor | None = None,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """See tk_quant.swiglu_forward. Rows of padding are 0."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    if clamped_count is not None:
        clamped_count += count_clamped(x, clamp, is_real)[: clamped_count.shape[0]]
    out = float32_forward(x, clamp, weight=weight)
    return out.masked_fill(~is_real.unsqueeze(1), 0).to(OUT_DTYPES[fmt])


def swiglu_backward(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    token_topk_to_pos: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    with_out: bool = False,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """See tk_quant.swiglu_backward."""
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    out, x_grad, row_grads = _in_pieces(x, grad_out, clamp, weight, OUT_DTYPES[fmt])
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
    x: torch.Tensor,
    grad_out: torch.Tensor,
    swiglu_clamp_value: float | None,
    weight: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """out and x_grad in `dtype` and each row's weight gradient. In pieces, as float64 of all rows may not fit."""
    inputs = (x, grad_out) if weight is None else (x, grad_out, weight)
    pieces = []
    for part_x, part_grad, *part_weight in zip(*(each.split(_ROWS) for each in inputs)):
        weights = {"weight": part_weight[0]} if part_weight else {}
        out, x_grad, row_grads = float32_backward(part_x, part_grad, swiglu_clamp_value, **weights)
        pieces.append((out.to(dtype), x_grad.to(dtype), row_grads))
    return tuple(map(torch.cat, zip(*pieces)))


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
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.swiglu_forward_and_per_token_cast. Data and sf of padding rows are 0; no other sf is 0."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    hidden = x.shape[1] // 2
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    is_real, weight = _rows(x, *maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    if clamped_count is not None:
        clamped_count += count_clamped(x, clamp, is_real)[: clamped_count.shape[0]]
    values = float32_forward(x, clamp, weight=weight)

    block_size = (1, num_per_channels or hidden)
    data, sf = cast(values, fmt, block_size, round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    data.view(torch.uint8)[~is_real] = 0
    sf[~is_real] = 0
    return data, pack_scales(sf, layout)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.swiglu_forward_and_per_channel_cast_and_transpose."""
    activation = float32_forward(x, swiglu_clamp_value).to(torch.bfloat16)
    data, sf = cast(activation, fmt, (num_per_tokens, 1), round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return data if without_transpose else transpose(data), sf


def swiglu_backward_and_per_token_cast(
    x: tuple[torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    weight: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor | None,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    token_alignment: int = 128,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = True,
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor | None]:
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
    results = float32_backward(values, grad_out[is_real], clamp, **of_rows)

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


def _weight_grad(
    row_grads: torch.Tensor, pos_to_token_topk: torch.Tensor | None, token_topk_to_pos: torch.Tensor | None
) -> torch.Tensor:
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


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, to nearest, ties to even; any NaN gets the bits that a GPU writes."""
    rounded = x.to(torch.bfloat16)
    rounded.view(torch.int16).masked_fill_(x.isnan(), _BF16_NAN_BITS)
    return rounded
