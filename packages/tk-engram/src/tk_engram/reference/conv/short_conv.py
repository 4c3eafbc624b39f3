"""Reference of short_conv, and the parts that the reference of its gradient shares."""

import torch
from torch import Tensor


def sequence_of(num_tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each token, the index of its sequence and that of the sequence's first token, int64 (T,)."""
    tokens = torch.arange(num_tokens, device=device)
    if cu_seqlens is None:
        return torch.zeros_like(tokens), torch.zeros_like(tokens)
    index = torch.searchsorted(cu_seqlens.long(), tokens, right=True) - 1
    return index, cu_seqlens.long()[index]


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x · rstd and rstd = rsqrt(mean(x²) + eps) over the last dimension, in float32, or float64 if x is float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def taps_of(n: Tensor, old: Tensor | None, dilation: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """n[t - (3 - j) · dilation] for j = 0 … 3; before the sequence, rows of `old` (B, 3 · dilation, m, H), or 0."""
    sequence, start = sequence_of(n.shape[0], cu_seqlens, n.device)
    taps = []
    for j in range(4):
        token = torch.arange(n.shape[0], device=n.device) - (3 - j) * dilation
        is_there = (token >= start).view(-1, 1, 1)
        if old is None:
            before: Tensor | float = 0.0
        else:
            before = old[sequence, (3 * dilation + token - start).clamp(0, 3 * dilation - 1)]
        taps.append(torch.where(is_there, n[token.clamp(min=0)], before))
    return taps


def short_conv(
    u: Tensor,
    norm_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """SiLU(Σ_j w[j] · n[t - (3 - j) · dilation]) with n = u · rsqrt(mean_H(u²) + eps) · norm_weight, + u + residual.

    u and residual (T, m, H), norm_weight (m, H), conv_weight (m, H, 4); cu_seqlens (B + 1). Rows before a sequence are
    0, or the state's (B, 3 · dilation, m, H), which is updated. In float32, or float64 if u is float64; rounded to u's
    dtype at the end.
    """
    n = normalized(u, eps)[0] * norm_weight
    old = None if state is None else normalized(state, eps)[0] * norm_weight
    y = torch.zeros_like(n)
    for j, tap in enumerate(taps_of(n, old, dilation, cu_seqlens)):
        y = y + conv_weight[..., j] * tap
    out = y * torch.sigmoid(y)
    if residual is not None:
        out = out + u + residual
    if state is not None:
        # To each sequence's old rows append its rows of u, and keep the last.
        offsets = [0, u.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
        for rows, start, end in zip(state, offsets, offsets[1:]):
            rows.copy_(torch.cat((rows, u[start:end]))[-len(rows) :])
    return out.to(u.dtype)
