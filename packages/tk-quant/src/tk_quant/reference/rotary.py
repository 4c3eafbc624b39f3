"""Rotary position embedding in plain PyTorch."""

import torch

from tk_core.reference.fma import fma


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
