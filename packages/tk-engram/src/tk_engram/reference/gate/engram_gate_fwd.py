"""Reference of engram_gate_fwd."""

from typing import Any

import torch
from torch import Tensor


def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    *,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """x + sigmoid(sign(d) · √max(|d|, clamp_value)) · v with d = dot · rstd_x · rstd_k · H^-½, rounded to x's dtype.

    x and k (T, m, H), v (T, H), weight_fused (m, H); computed in float32, for float64 x in float64. Returns (out, dot,
    gate, rstd_x, rstd_k), of which the last four are (T, m), or all None.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    x, k, v = hidden_states.to(dtype), k.to(dtype), v.to(dtype).unsqueeze(1)
    rstd_x = torch.rsqrt(x.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(k.square().mean(-1) + eps)
    dot = (x * weight_fused * k).sum(-1)
    d = dot * rstd_x * rstd_k * x.shape[-1] ** -0.5
    gate = torch.sigmoid(d.sign() * d.abs().clamp_min(clamp_value).sqrt())
    saved = (dot, gate, rstd_x, rstd_k)
    kept = x if add_residual else torch.zeros_like(x)
    out = kept + gate.unsqueeze(-1) * v
    if image_token_mask is not None:
        saved = tuple(each.masked_fill(image_token_mask[:, None], 0) for each in saved)
        out = torch.where(image_token_mask[:, None, None], kept, out)
    if inplace:
        out = hidden_states.copy_(out)
    return (out.to(hidden_states.dtype), *(saved if save_for_backward else (None,) * 4))


def engram_gate_fwd_into(
    hidden_states: Tensor | None, hidden_states_: Tensor | None, *inputs: Any, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`engram_gate_fwd` of hidden_states, or of hidden_states_ and in place."""
    if hidden_states is None:
        return engram_gate_fwd(hidden_states_, *inputs, inplace=True, **options)
    return engram_gate_fwd(hidden_states, *inputs, **options)
