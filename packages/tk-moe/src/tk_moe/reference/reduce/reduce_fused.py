"""reduce_fused and expand_to_fused_bwd in plain PyTorch."""

import torch

from tk_core.reference.fma import fma

# Elements processed at a time, so that their float64 values stay in a CPU's cache.
_CPU_CHUNK = 1 << 17
_CHUNK = 1 << 24


def reduce_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's rows from the experts' segments: acc = fma(x[pos], weight * row_sf[pos], acc), k ascending.

    x (num_expanded_tokens, hidden) bfloat16 or float32, or a pair with row_sf, a float32 factor for each row;
    topk_weights float32 and token_topk_to_pos int32 (num_tokens, num_topk). Slots without a position inside x
    are skipped. With fp8_format "e4m3" the sum is multiplied by sf[0] if given, and rounded to float8_e4m3fn with
    saturation. Returns (num_tokens, hidden): `out`, or a new tensor.
    """
    x, row_sf = x if isinstance(x, tuple | list) else (x, None)
    num_tokens, hidden = token_topk_to_pos.shape[0], x.shape[1]
    out_dtype = torch.float8_e4m3fn if fp8_format else x.dtype
    if out is None:
        out = x.new_empty((num_tokens, hidden), dtype=out_dtype)
    scales = _scales(topk_weights, row_sf, token_topk_to_pos)
    chunk = max(1, (_CPU_CHUNK if x.device.type == "cpu" else _CHUNK) // max(1, hidden))
    for first in range(0, num_tokens, chunk):
        tokens = slice(first, first + chunk)
        acc = _sum(x, None if scales is None else scales[tokens], token_topk_to_pos[tokens])
        _write(acc, fp8_format, sf, out[tokens])
    return out


def expand_to_fused_bwd(grad_rows: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows of grad_rows (num_expanded_tokens, hidden) in float32, slots ascending; round to its dtype.

    Positions outside grad_rows are skipped.
    """
    return reduce_fused(grad_rows, None, token_topk_to_pos)


def _scales(
    topk_weights: torch.Tensor | None, row_sf: torch.Tensor | None, token_topk_to_pos: torch.Tensor
) -> torch.Tensor | None:
    """The factor of each row, float32 (num_tokens, num_topk), or None."""
    if row_sf is None or not len(row_sf):
        return topk_weights
    row_sf = row_sf[token_topk_to_pos.long().clamp(0, len(row_sf) - 1)]
    return row_sf if topk_weights is None else topk_weights * row_sf


def _sum(x: torch.Tensor, scales: torch.Tensor | None, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    num_tokens, num_topk = token_topk_to_pos.shape
    num_expanded_tokens, hidden = x.shape
    acc = x.new_zeros((num_tokens, hidden), dtype=torch.float32)
    for k in range(num_topk if num_expanded_tokens else 0):
        pos = token_topk_to_pos[:, k].long()
        has_row = (pos >= 0) & (pos < num_expanded_tokens)
        rows = x[pos.where(has_row, 0)].float()
        added = acc + rows if scales is None else fma(rows, scales[:, k, None], acc)
        acc = torch.where(has_row[:, None], added, acc)
    return acc


def _write(acc: torch.Tensor, fp8_format: str, sf: torch.Tensor | None, out: torch.Tensor) -> None:
    # The NaN that float32 arithmetic produces on this device.
    infinity = acc.new_full((), torch.inf)
    acc = torch.where(acc.isnan(), infinity - infinity, acc)
    if fp8_format:
        if sf is not None:
            acc = acc * sf
        is_nan = acc.isnan()
        rounded = acc.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        acc = torch.where(is_nan, 0x7F, rounded).to(torch.uint8).view(torch.float8_e4m3fn)
    out.copy_(acc)
