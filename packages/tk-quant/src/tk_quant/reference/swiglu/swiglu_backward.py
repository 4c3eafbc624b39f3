"""Reference of swiglu_backward."""

import torch

from tk_quant.reference.lib.swiglu import position_weights, real_positions
from tk_quant.reference.lib.swiglu import swiglu_backward as float32_swiglu_backward
from tk_quant.reference.swiglu.swiglu_forward import OUT_DTYPES

_ROWS = 2**16


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
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """See tk_quant.swiglu_backward."""
    is_real = real_positions(x.shape[0], pos_to_token_topk, topk_weights, pos_to_expert, x.device)
    weight = None
    if pos_to_token_topk is not None:
        weight = position_weights(pos_to_token_topk, topk_weights, is_real)
    out, x_grad, row_grads = _in_pieces(x, grad_out, swiglu_clamp_value, weight, OUT_DTYPES[fmt])
    out, x_grad = (y.masked_fill(~is_real.unsqueeze(1), 0) for y in (out, x_grad))
    weight_grad = None
    if token_topk_to_pos is not None:
        row_grads = row_grads.masked_fill(~is_real, 0)
        has_row = (token_topk_to_pos >= 0) & (token_topk_to_pos < x.shape[0])
        # An extra row of zero for pairs without a row.
        weight_grad = torch.cat((row_grads, row_grads.new_zeros(1)))[token_topk_to_pos.where(has_row, -1).long()]
    return out if with_out else None, x_grad, weight_grad


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
        out, x_grad, row_grads = float32_swiglu_backward(part_x, part_grad, swiglu_clamp_value, **weights)
        pieces.append((out.to(dtype), x_grad.to(dtype), row_grads))
    return tuple(map(torch.cat, zip(*pieces)))
