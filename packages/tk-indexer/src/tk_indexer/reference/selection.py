"""Reference of topk_indices."""

import torch
from torch import Tensor

_CHUNK_BYTES = 256 << 20
"""The most that the largest temporary tensor takes, the int64 order of some rows, if a row takes no more."""
_NO_KEY = -(2**31)
_NAN_KEY = 2**31 - 1


def topk_indices(
    logits: Tensor,
    k: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int = 1,
    rows_per_batch: int = 1,
    row_to_batch: Tensor | None = None,
    raw_out: Tensor | None = None,
    out: Tensor | None = None,
    return_counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The first `k` columns of a stable descending sort of each row's candidates, in ascending order."""
    num_rows, num_cols = logits.shape
    starts = logits.new_zeros(num_rows, dtype=torch.int64) if starts is None else starts.long().clamp(0, num_cols)
    ends = torch.full_like(starts, num_cols) if ends is None else ends.long().clamp(0, num_cols)
    batches = torch.arange(num_rows, device=logits.device) // rows_per_batch
    if row_to_batch is not None and block_table is not None:
        batches = row_to_batch.long()
        ends = torch.where((batches >= 0) & (batches < block_table.shape[0]), ends, 0)

    columns = torch.full((num_rows, k), num_cols, device=logits.device)  # num_cols: padding
    chunk = max(1, _CHUNK_BYTES // (8 * max(num_cols, 1)))
    for first in range(0, num_rows, chunk):
        rows = slice(first, first + chunk)
        found = _select(logits[rows], k, starts[rows, None], ends[rows, None])
        columns[rows, : found.shape[1]] = found

    is_entry = columns < num_cols
    counts = is_entry.sum(dim=1, dtype=torch.int32)
    relative = columns - starts[:, None]
    if raw_out is not None:
        raw_out.copy_(torch.where(is_entry, relative, -1))
    indices = torch.where(is_entry, relative, -1)
    if offsets is not None:
        indices = torch.where(is_entry, relative + offsets[:, None], -1).to(torch.int32)
    elif block_table is not None:
        indices = _positions(indices, block_table, block_size, batches)
    if out is None:
        out = indices.to(torch.int32)
    else:
        out.copy_(indices)
    return (out, counts) if return_counts else out


def _select(logits: Tensor, k: int, starts: Tensor, ends: Tensor) -> Tensor:
    """The columns of the k best candidates in ascending order, then the number of columns; int64 (rows, min(k, N))."""
    num_cols = logits.shape[1]
    column = torch.arange(num_cols, device=logits.device)
    is_candidate = (column >= starts) & (column < ends) & (logits != -torch.inf)
    # Integers, as sorts of floats tell -0 from 0 and order NaNs differently on different devices.
    bits = logits.float().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = torch.where(logits == 0, 0, keys)
    keys = torch.where(logits.isnan(), _NAN_KEY, keys)
    keys = torch.where(is_candidate, keys, _NO_KEY)
    order = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, :k]
    return torch.where(is_candidate.gather(1, order), order, num_cols).sort(dim=1).values


def _positions(indices: Tensor, block_table: Tensor, block_size: int, batches: Tensor) -> Tensor:
    """Positions in a paged cache, by the blocks that block_table has for each row's sequence; -1 where it has none."""
    num_batches, num_pages = block_table.shape
    if num_batches == 0 or num_pages == 0:
        return torch.full_like(indices, -1)
    page = indices.div(block_size, rounding_mode="floor")
    is_listed = (page >= 0) & (page < num_pages)
    rows = batches.clamp(0, num_batches - 1)[:, None]
    blocks = block_table[rows, page.clamp(0, num_pages - 1)].long()
    positions = blocks * block_size + indices % block_size
    is_position = (blocks >= 0) & (positions < 2**31)
    return torch.where(is_listed & is_position, positions, -1)
