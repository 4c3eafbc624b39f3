"""HyperConnection and HyperHead in plain PyTorch, with the parameters of tk_modeling's.

Mixes and sums over streams are computed in the parameters' dtype; results have that of the residual.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


class HyperConnection(nn.Module):
    """mHC around a sublayer: mixes from the residual, the streams collapsed, the sublayer, the streams mixed."""

    def __init__(
        self,
        sublayer: nn.Module,
        hidden: int,
        *,
        mhc_mult: int = 4,
        post_mult_value: float = 2.0,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        sinkhorn_repeat: int = 20,
        norm_weight: bool = False,
        shifted: bool = False,
        comb: bool = True,
        post_eps: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.mhc_mult = mhc_mult
        self.post_mult_value = post_mult_value
        self.norm_eps = norm_eps
        self.pre_eps = pre_eps
        self.sinkhorn_eps = sinkhorn_eps
        self.sinkhorn_repeat = sinkhorn_repeat
        self.shifted = shifted
        self.post_eps = post_eps
        m, width = mhc_mult, mhc_mult * hidden
        float32 = {"dtype": torch.float32, "device": device}
        self.fn = nn.Parameter(0.02 * torch.randn(m * (m + 2 if comb else 2), width, **float32))
        self.scale = nn.Parameter(torch.full((3 if comb else 2,), 0.01, **float32))
        pre = torch.full((m,), _logit(1 / m - pre_eps), **float32)
        post = torch.full((m,), _logit((1 - post_eps) / post_mult_value), **float32)
        logits = 8 * torch.eye(m, **float32).flatten()
        self.base = nn.Parameter(torch.cat((pre, post, logits) if comb else (pre, post)))
        self.norm_weight = nn.Parameter(torch.ones(width, **float32)) if norm_weight else None

    def forward(self, residual: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        """The new residual, or (residual, *rest); shifted, (residual, next_pre_mix, *rest) from (residual, pre_mix)."""
        m = self.mhc_mult
        mixes = _project(residual, self.fn, self.norm_weight, self.norm_eps)
        sizes = (m, m, m * m)[: len(self.scale)]
        groups = zip(mixes.split(sizes, -1), self.scale, self.base.split(sizes))
        pre, post, *comb = (mix * scale + base for mix, scale, base in groups)
        pre = (pre.sigmoid() + self.pre_eps).unsqueeze(-1)
        post = (post.sigmoid() * self.post_mult_value + self.post_eps).unsqueeze(-1)
        collapse_mix = pre
        if self.shifted:
            collapse_mix, *args = args
        layer_input = residual[..., 0, :] if collapse_mix is None else _collapse(residual, collapse_mix)
        output = self.sublayer(layer_input, *args, **kwargs)
        y, *rest = output if isinstance(output, tuple) else (output,)
        streams = residual.to(post.dtype)
        if comb:
            streams = _sinkhorn(comb[0].unflatten(-1, (m, m)), self.sinkhorn_repeat, self.sinkhorn_eps).mT @ streams
        new_residual = (post * y.unsqueeze(-2) + streams).to(residual.dtype)
        if self.shifted:
            return new_residual, pre, *rest
        return (new_residual, *rest) if rest else new_residual


class HyperHead(nn.Module):
    """The streams collapsed with weights that are computed from them."""

    def __init__(
        self,
        hidden: int,
        *,
        mhc_mult: int = 4,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        norm_weight: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.pre_eps = pre_eps
        width = mhc_mult * hidden
        float32 = {"dtype": torch.float32, "device": device}
        self.fn = nn.Parameter(0.02 * torch.randn(mhc_mult, width, **float32))
        self.scale = nn.Parameter(torch.full((1,), 0.01, **float32))
        self.base = nn.Parameter(torch.full((mhc_mult,), _logit(1 / mhc_mult - pre_eps), **float32))
        self.norm_weight = nn.Parameter(torch.ones(width, **float32)) if norm_weight else None

    def forward(self, residual: Tensor) -> Tensor:
        """(..., m, hidden) to (..., hidden)."""
        mixes = _project(residual, self.fn, self.norm_weight, self.norm_eps)
        pre = (mixes * self.scale + self.base).sigmoid() + self.pre_eps
        return _collapse(residual, pre.unsqueeze(-1))


def _project(residual: Tensor, fn: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over all streams, then the product with fn."""
    x = residual.flatten(-2).to(fn.dtype)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if norm_weight is not None:
        x = x * norm_weight
    return x @ fn.mT


def _sinkhorn(logits: Tensor, repeat: int, eps: float) -> Tensor:
    """Softmax of rows, then columns and rows in turn divided by their sums, columns last."""
    x = logits.softmax(-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


def _collapse(residual: Tensor, mix: Tensor) -> Tensor:
    return (mix * residual).sum(-2).to(residual.dtype)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """(..., H) to (..., mhc_mult, H): copies."""
    return x.unsqueeze(-2).repeat_interleave(mhc_mult, -2)
