"""SwiGLU in plain PyTorch: the parts of the fused ops' references. For any device."""

import torch

from tk_core.reference.fma import fma


def halves(x: torch.Tensor, swiglu_clamp_value: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate l and value r of x (..., 2 * hidden) in float32; with a clamp value c, l to (-inf, c] and r to [-c, c]."""
    gate, value = x.to(torch.float32).chunk(2, dim=-1)
    if swiglu_clamp_value is None:
        return gate, value
    return gate.clamp(max=swiglu_clamp_value), value.clamp(min=-swiglu_clamp_value, max=swiglu_clamp_value)


def swiglu_forward(
    x: torch.Tensor, swiglu_clamp_value: float | None = None, *, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """l / (1 + exp(-l)) * r for x = [l | r], each operation rounded to float32, left to right.

    Args:
        x: (..., 2 * hidden), the gate l in the left half; computed in float32 whatever its dtype.
        swiglu_clamp_value: l and r are clamped first, see `halves`.
        weight: float32 (...,), a factor for each row, multiplied last.

    Returns:
        float32 (..., hidden).
    """
    gate, value = halves(x, swiglu_clamp_value)
    out = gate / (1 + torch.exp(-gate)) * value
    return out if weight is None else out * weight.unsqueeze(-1)


def swiglu_backward(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward and gradients of out = l / (1 + exp(-l)) * r * weight for x = [l | r], all in float32.

    With d = 1 + exp(-l), s = 1 / d, a = l / d * r and gs = grad_out * weight * s, products from left to right:

        out = a * weight;  dl = gs * r * fma(l, 1 - s, 1);  dr = gs * l;  grad of weight = sum of grad_out * a

    Args:
        x: (..., 2 * hidden), the gate l in the left half; computed in float32 whatever its dtype.
        grad_out: (..., hidden), the gradient of out.
        swiglu_clamp_value: l and r are clamped first, see `halves`; dl and dr are zero where l and r were clamped.
        weight: float32 (...,), one for each row; 1 if None.

    Returns:
        `(out, x_grad, weight_grad)`: float32 (..., hidden), (..., 2 * hidden) and (...,).
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
    """Numbers of l > c, r > c and r < -c in x = [l | r], int64 (3,); `is_real` (bool) picks the rows that count."""
    gate, value = halves(x if is_real is None else x[is_real])
    beyond = (gate > swiglu_clamp_value, value > swiglu_clamp_value, value < -swiglu_clamp_value)
    return torch.stack([each.sum() for each in beyond])


def real_positions(
    num_positions: int,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Which positions are not padding, bool (num_positions,): indices not negative, and inside topk_weights."""
    is_real = torch.ones(num_positions, dtype=torch.bool, device=device)
    if pos_to_token_topk is not None:
        is_real &= pos_to_token_topk >= 0
        if topk_weights is not None:
            is_real &= pos_to_token_topk < topk_weights.numel()
    if pos_to_expert is not None:
        is_real &= pos_to_expert >= 0
    return is_real


def position_weights(
    pos_to_token_topk: torch.Tensor, topk_weights: torch.Tensor, is_real: torch.Tensor
) -> torch.Tensor:
    """The weight of each position, float32; 0 for padding."""
    weights = torch.zeros(is_real.shape, dtype=torch.float32, device=is_real.device)
    weights[is_real] = topk_weights.flatten()[pos_to_token_topk[is_real].to(torch.int64)]
    return weights
