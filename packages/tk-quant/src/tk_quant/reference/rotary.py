"""Rotary position embedding in plain PyTorch."""

import torch

from tk_core.reference.fma import fma
from tk_quant.reference.norm import norm_backward, norm_forward


def apply_rotary(
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
    *,
    sin_cache: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    key_out: torch.Tensor | None = None,
) -> None:
    """See tk_quant.apply_rotary."""
    cos, sin = cos_sin_cache.chunk(2, -1) if sin_cache is None else (cos_sin_cache, sin_cache)
    if positions is None:
        positions = torch.arange(query.shape[-3], device=query.device).expand(query.shape[:-2])
    rows = positions.long() + seqlen_offset
    is_known = (rows >= 0) & (rows < cos.shape[-2])
    rows = torch.where(is_known, rows, 0)
    if not cos.shape[-2]:
        cos, sin = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (cos, sin))
    if cos.ndim == 3:
        rows = (torch.arange(len(rows), device=rows.device)[:, None], rows)
    # One axis more for the heads.
    cos, sin = (x[rows].float()[..., None, :] for x in (cos, sin))
    for x, written in ((query, query if out is None else out), (key, key if key_out is None else key_out)):
        if x is not None:
            written.copy_(_turned(x, cos, -sin if conjugate else sin, is_known[..., None, None], interleaved))


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_known: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x with its first channels turned, and with zeros there where a position is not known."""
    half = cos.shape[-1]
    turning = x[..., : 2 * half].float()
    pairs = turning.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = (fma(first, cos, -(second * sin)), fma(first, sin, second * cos))
    found = torch.stack(turned, -1 if interleaved else -2).flatten(-2).masked_fill(~is_known, 0.0)
    # A GPU writes every NaN like this; a CPU keeps its sign and payload.
    found.view(torch.int32).masked_fill_(found.isnan(), 0x7FFFFFFF)
    found = found.to(x.dtype)
    if x.dtype is torch.bfloat16:
        found.view(torch.int16).masked_fill_(found.isnan(), 0x7FFF)
    return torch.cat((found, x[..., 2 * half :]), -1)


def qk_norm_rotary(
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offset: int = 0,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    sin_cache: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    key_out: torch.Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """See tk_quant.qk_norm_rotary."""
    options = {"weight_offset": weight_offset, "round_before_weight": round_before_weight, "with_rstd": True}
    (normed, rstd, _), (normed_key, key_rstd, _) = (
        (None, None, None) if x is None else norm_forward(x, weight, eps, **options)
        for x, weight in ((query, query_weight), (key, key_weight))
    )
    written = {"out": query if out is None else out, "key_out": key if key_out is None else key_out}
    apply_rotary(
        normed, cos_sin_cache, normed_key, positions, interleaved, False, seqlen_offset, sin_cache=sin_cache, **written
    )
    return (rstd, key_rstd) if with_rstd else None


def qk_norm_rotary_backward(
    out_grad: torch.Tensor,
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    query_rstd: torch.Tensor,
    key_out_grad: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    key_rstd: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offset: int = 0,
    *,
    weight_offset: float = 0.0,
    sin_cache: torch.Tensor | None = None,
    query_weight_grad: torch.Tensor | None = None,
    key_weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See tk_quant.qk_norm_rotary_backward."""
    turned, turned_key = (None if x is None else x.new_empty(x.shape) for x in (out_grad, key_out_grad))
    options = positions, interleaved, True, seqlen_offset
    apply_rotary(out_grad, cos_sin_cache, key_out_grad, *options, sin_cache=sin_cache, out=turned, key_out=turned_key)
    offset = {"weight_offset": weight_offset}
    grads = norm_backward(turned, query, query_weight, query_rstd, None, 1.0, query_weight_grad, **offset)
    of_key = None, None
    if key is not None:
        of_key = norm_backward(turned_key, key, key_weight, key_rstd, None, 1.0, key_weight_grad, **offset)
    return grads[0], of_key[0], grads[1], of_key[1]
