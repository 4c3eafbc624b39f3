"""Reference of engram_gate_bwd."""

from typing import Any

import torch
from torch import Tensor

from tk_engram.sizes import num_token_ranges


def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    *,
    image_token_mask: Tensor | None = None,
    add_residual: bool = True,
    grad_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `engram_gate_fwd` by x, k and v, rounded to their dtype, and by the fused weight in parts.

    Computed in float32, or float64 for float64 x. Part b of the weight's gradient sums the tokens b, b + parts, …
    """
    num_tokens, mhc_mult, hidden = hidden_states.shape
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    grad, x, k_wide, v_wide = (each.to(dtype) for each in (grad_out, hidden_states, k, v.unsqueeze(1)))
    # (T, m), then (T, m, 1)
    d = dot * rstd_x * rstd_k * hidden**-0.5
    passes = (d != 0) & (d.abs() >= clamp_value)
    slope = torch.where(passes, 0.5 * d.abs().rsqrt(), 0)
    d_d = (grad * v_wide).sum(-1) * gate_score * (1 - gate_score) * slope
    d_dot = (d_d * rstd_x * rstd_k * hidden**-0.5).unsqueeze(-1)
    by_square_x = (d_d * d * rstd_x.square() / hidden).unsqueeze(-1)
    by_square_k = (d_d * d * rstd_k.square() / hidden).unsqueeze(-1)

    masked = torch.zeros((), dtype=torch.bool, device=x.device)
    if image_token_mask is not None:
        masked = image_token_mask[:, None, None]
    grad_x = (d_dot * weight_fused * k_wide - by_square_x * x).masked_fill(masked, 0)
    if add_residual:
        grad_x = grad + grad_x
    grad_k = (d_dot * weight_fused * x - by_square_k * k_wide).masked_fill(masked, 0)
    grad_v = (gate_score.unsqueeze(-1) * grad).masked_fill(masked, 0).sum(1)
    grad_w = (d_dot * x * k_wide).masked_fill(masked, 0)
    num_parts = num_token_ranges(mhc_mult, hidden)
    grad_w_partial = grad_w.new_zeros((num_parts, mhc_mult, hidden))
    grad_w_partial.index_add_(0, torch.arange(num_tokens, device=x.device) % num_parts, grad_w)

    grad_x, grad_k, grad_v = (each.to(hidden_states.dtype) for each in (grad_x, grad_k, grad_v))
    if grad_kv is not None:
        grad_kv[:, :mhc_mult] = grad_k
        grad_kv[:, mhc_mult] = grad_v
        grad_k, grad_v = grad_kv[:, :mhc_mult], grad_kv[:, mhc_mult]
    return grad_x, grad_k, grad_v, grad_w_partial


def engram_gate_bwd_into(
    *inputs: Any, grad_kv: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`engram_gate_bwd`, which returns a given grad_kv instead of its two views."""
    grad_x, grad_k, grad_v, grad_w_partial = engram_gate_bwd(*inputs, grad_kv=grad_kv, **options)
    return grad_x, *((grad_k, grad_v) if grad_kv is None else (grad_kv, None)), grad_w_partial
