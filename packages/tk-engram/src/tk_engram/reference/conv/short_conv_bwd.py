"""Reference of short_conv_bwd."""

import torch
from torch import Tensor

from tk_engram.reference.conv.short_conv import normalized, sequence_of, taps_of


def short_conv_bwd(
    d_out: Tensor,
    u: Tensor,
    norm_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-5,
    has_residual: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `short_conv` without a state by u, norm_weight and conv_weight, in float32 (float64 for float64 u).

    With x = u · rstd and n = x · norm_weight: d_y = d_out · SiLU'(y), d_conv_weight[j] =
    Σ_t d_y[t] · n[t - (3 - j) · d], d_n[t] = Σ_j w[j] · d_y[t + (3 - j) · d], d_norm_weight = Σ_t d_n · x,
    d_x = d_n · norm_weight and d_u = rstd · (d_x - x · mean_H(d_x · x)) (+ d_out), rounded to u's dtype.
    """
    num_tokens = u.shape[0]
    x, rstd = normalized(u, eps)
    norm_weight, conv_weight, grad = (w.to(x.dtype) for w in (norm_weight, conv_weight, d_out))
    taps = taps_of(x * norm_weight, None, dilation, cu_seqlens)
    y = torch.stack([conv_weight[..., j] * tap for j, tap in enumerate(taps)]).sum(0)
    s = torch.sigmoid(y)
    d_y = grad * (s * (1 + y * (1 - s)))
    d_conv_weight = torch.stack([(d_y * tap).sum(0) for tap in taps], -1)

    _, start = sequence_of(num_tokens, cu_seqlens, u.device)
    tokens = torch.arange(num_tokens, device=u.device)
    d_n = torch.zeros_like(x)
    for j in range(4):
        later = tokens + (3 - j) * dilation
        index = later.clamp(max=max(num_tokens - 1, 0))
        is_there = (later < num_tokens) & (start[index] <= tokens)
        d_n = d_n + torch.where(is_there.view(-1, 1, 1), conv_weight[..., j] * d_y[index], 0.0)
    d_x = d_n * norm_weight
    d_u = rstd * (d_x - x * (d_x * x).mean(-1, keepdim=True))
    if has_residual:
        d_u = d_u + grad
    return d_u.to(u.dtype), (d_n * x).sum(0), d_conv_weight
