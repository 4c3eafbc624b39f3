"""References of the scores of queries and keys."""

from itertools import product

import torch
from torch import Tensor

from tk_core.math import align
from tk_indexer.reference.casts import parts_of_cache, widen_rows

_CHUNK_BYTES = 256 << 20
"""The most that the products of some rows and all keys take, if those of a row take no more."""
_ROW_BYTES = 1024
_CHUNK_KEYS = 64
"""Keys between two places at which a thread block may begin."""


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

    Of FP4, the scores of widened rows. Columns outside of the windows are -inf with and without clean_logits.
    """
    (data, q_sf), (k, sf) = q, kv
    if q_sf is not None:
        data, factors = widen_rows(data, q_sf)
        weights = weights * factors
        k, sf = widen_rows(k, sf)
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


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Thread block i begins at chunk total * i // num_sms of all sequences' chunks, one after another."""
    device = context_lens.device
    chunks = -(-context_lens.long().clamp(min=0).amax(dim=1) // _CHUNK_KEYS)
    ends = chunks.cumsum(0)
    total = chunks.sum()
    place = torch.arange(num_sms + 1, device=device) * total // num_sms
    seq = torch.searchsorted(ends, place, right=True)
    begins = torch.cat((ends - chunks, total[None]))
    schedule = torch.stack((seq, place - begins[seq]), dim=1)
    schedule[0] = 0
    return schedule.int()


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """The scores of each sequence's pages, in float64 up to the last rounding; schedule_meta and indices do not matter.

    Of FP4, the scores of widened rows. Columns behind the lengths are -inf with and without clean_logits.
    """
    data, q_sf = q
    if q_sf is not None:
        data, factors = widen_rows(data, q_sf)
        weights = weights * factors.view(weights.shape)
    num_seqs, next_n, num_heads, dim = data.shape
    num_blocks, block_kv, num_pages = *kv_cache.shape[:2], block_table.shape[1]
    k, sf = parts_of_cache(kv_cache, q[0].shape[-1])
    stride = align(max_context_len, _ROW_BYTES // logits_dtype.itemsize)
    shape = num_seqs * next_n, max_context_len
    out = data.new_empty_strided(shape, (stride, 1), dtype=logits_dtype).fill_(-torch.inf)
    scores = out.view(num_seqs, next_n, max_context_len)
    weights = weights.double().view(num_seqs, next_n, num_heads, 1)
    key_bytes = 8 * max(next_n * num_heads, dim)
    step = max(_CHUNK_BYTES // key_bytes // block_kv, 1)
    pages = min(num_pages, -(-max_context_len // block_kv)) if num_blocks else 0
    together = max(_CHUNK_BYTES // (key_bytes * block_kv * max(min(step, pages), 1)), 1)
    for first_seq, first in product(range(0, num_seqs, together), range(0, pages, step)):
        seqs = slice(first_seq, first_seq + together)
        blocks = block_table[seqs, first : first + step].long()
        is_listed = (blocks >= 0) & (blocks < num_blocks)
        blocks = blocks.where(is_listed, 0)
        keys, factors = (part[blocks].flatten(1, 2) for part in (k, sf))
        if q_sf is None:
            keys, factors = keys.view(torch.float8_e4m3fn), factors.view(torch.float32)[..., 0]
        else:
            keys, factors = widen_rows(keys, factors.view(torch.int32)[..., 0])
        products = data[seqs].double().flatten(1, 2) @ keys.double().mT
        heads = products.clamp_(min=0).unflatten(1, (next_n, num_heads)).mul_(weights[seqs])
        found = (heads.sum(dim=2) * factors.double()[:, None]).float()
        column = first * block_kv + torch.arange(keys.shape[1], device=data.device)
        is_seen = is_listed.repeat_interleave(block_kv, 1)[:, None] & (column < context_lens[seqs, :, None])
        columns = slice(first * block_kv, min(first * block_kv + keys.shape[1], max_context_len))
        found = torch.where(is_seen, found, -torch.inf)[..., : columns.stop - columns.start]
        scores[seqs, :, columns] = found.to(logits_dtype)
    return out
