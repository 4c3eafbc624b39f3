"""References of the scores of queries and keys."""

import torch
from torch import Tensor

from tk_core.math import align

_CHUNK_BYTES = 256 << 20
"""The most that the products of some rows and all keys take, if those of a row take no more."""
_ROW_BYTES = 1024


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """sf[n] * sum over h of weights[s, h] * max(q[s, h] . k[n], 0), in float64 up to the last rounding.

    Columns outside of the windows are -inf with and without clean_logits.
    """
    (data, _), (k, sf) = q, kv
    num_rows, num_heads, dim = data.shape
    num_keys = k.shape[0]
    starts, ends = (x.long().clamp(0, num_keys)[:, None] for x in (cu_seq_len_k_start, cu_seq_len_k_end))
    num_cols = max_seqlen_k or num_keys
    column = torch.arange(num_cols, device=data.device)[None]
    keys = column + starts if max_seqlen_k else column.expand(num_rows, -1)
    is_inside = (keys >= starts) & (keys < ends)
    stride = align(num_cols, _ROW_BYTES // logits_dtype.itemsize)
    out = data.new_empty_strided((num_rows, num_cols), (stride, 1), dtype=logits_dtype).fill_(-torch.inf)
    chunk = max(1, _CHUNK_BYTES // (8 * num_heads * max(num_keys, 1)))
    for first in range(0, num_rows if num_keys else 0, chunk):
        rows = slice(first, first + chunk)
        products = data[rows].double().view(-1, dim) @ k.double().t()
        heads = products.view(-1, num_heads, num_keys).clamp_(min=0).mul_(weights[rows].double()[..., None])
        scores = (heads.sum(dim=1) * sf.double()).float()
        scores = scores.gather(1, keys[rows].clamp(max=num_keys - 1))
        out[rows] = torch.where(is_inside[rows], scores, -torch.inf).to(logits_dtype)
    return out
