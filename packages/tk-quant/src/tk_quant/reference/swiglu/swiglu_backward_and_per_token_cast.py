"""Reference of swiglu_backward_and_per_token_cast."""

import torch

from tk_quant.reference.lib.cast import cast
from tk_quant.reference.lib.formats import dequantize
from tk_quant.reference.lib.swiglu import position_weights, real_positions, swiglu_backward

_BF16_NAN_BITS = 0x7FFF


def swiglu_backward_and_per_token_cast(
    x: tuple[torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """See tk_quant.swiglu_backward_and_per_token_cast."""
    data, sf = (each.flatten(0, -2) for each in x)
    grad_out, pos_to_token_topk = grad_out.flatten(0, -2), pos_to_token_topk.flatten()
    leading, num_positions, block_size = x[0].shape[:-1], data.shape[0], (1, num_per_channels)
    is_real = real_positions(num_positions, pos_to_token_topk, weight, None, data.device)
    weights = position_weights(pos_to_token_topk, weight, is_real)[is_real]
    values = dequantize((data[is_real], sf[is_real]), block_size)
    results = swiglu_backward(values, grad_out[is_real], swiglu_clamp_value, weight=weights)

    # Padding has the result of a row of zeros.
    zeros = torch.zeros(1, 2 * num_per_channels, dtype=torch.float32, device=data.device)
    x_grad_data = torch.zeros_like(data)
    options = {"round_sf": round_sf, "sf_clamp_min": sf_clamp_min}
    x_grad_sf = cast(zeros, "e4m3", block_size, **options)[1][:, :1].repeat(sf.shape)
    out, x_grad = torch.zeros_like(grad_out), grad_out.new_zeros(data.shape)
    row_grads = torch.zeros(num_positions, dtype=torch.float32, device=data.device)
    x_grad_data[is_real], x_grad_sf[is_real] = cast(results[1], "e4m3", block_size, **options)
    out[is_real], x_grad[is_real], row_grads[is_real] = _to_bf16(results[0]), _to_bf16(results[1]), results[2]

    # A pair's gradient is that of its row, if that row is the pair's.
    pos = token_topk_to_pos.flatten().to(torch.int64)
    has_row = (pos >= 0) & (pos < num_positions)
    weight_grad = torch.zeros(pos.shape, dtype=torch.float32, device=data.device)
    if num_positions:
        pos = pos.where(has_row, 0)
        has_row &= pos_to_token_topk[pos] == torch.arange(pos.numel(), device=data.device)
        weight_grad = torch.where(has_row, row_grads[pos], weight_grad)
    return (
        out.unflatten(0, leading),
        (x_grad_data.unflatten(0, leading), x_grad_sf.unflatten(0, leading)),
        x_grad.unflatten(0, leading),
        weight_grad.view(token_topk_to_pos.shape),
    )


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, to nearest, ties to even; any NaN gets the bits that a GPU writes."""
    rounded = x.to(torch.bfloat16)
    rounded.view(torch.int16).masked_fill_(x.isnan(), _BF16_NAN_BITS)
    return rounded
