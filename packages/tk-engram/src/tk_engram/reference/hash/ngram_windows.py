"""Reference of ngram_windows."""

import torch
from torch import Tensor


def ngram_windows(
    token_ids: Tensor,
    cu_seqlens: Tensor | None,
    N: int,  # noqa: N803
    pad_id: int,
    *,
    block_id: int | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """out[t, k] = id of token t - k; pad_id from the first k on whose token is before the sequence or block_id.

    token_ids (T); cu_seqlens (B + 1), or None for one sequence; history (B, N - 1), the ids before each sequence,
    newest first, until one is negative. (T, N).
    """
    tokens = torch.arange(len(token_ids), device=token_ids.device)
    if cu_seqlens is None:
        sequences = begins = torch.zeros_like(tokens)
    else:
        sequences = torch.searchsorted(cu_seqlens[:-1].long(), tokens, right=True) - 1
        begins = cu_seqlens.long()[sequences]
    columns = []
    is_open = torch.ones_like(tokens, dtype=torch.bool)
    for k in range(N):
        ids = token_ids[(tokens - k).clamp(min=0)]
        is_there = tokens - k >= begins
        if history is not None and k > 0:
            earlier = history[sequences, (k - 1 - (tokens - begins)).clamp(min=0)]
            ids = torch.where(is_there, ids, earlier)
            is_there = is_there | (earlier >= 0)
        is_open = is_open & is_there & (True if block_id is None else ids != block_id)
        columns.append(torch.where(is_open, ids, pad_id))
    return torch.stack(columns, 1)
