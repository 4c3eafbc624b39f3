"""Reference of engram_lookup_bwd."""

import torch
from torch import Tensor


def engram_lookup_bwd(
    d_o: Tensor, indices: Tensor, num_rows: int, *, grad: Tensor | None = None, sparse: bool = False
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Each row's sum of d_o (T, C, D) over the pairs with indices[t, c] = row, (t, c) ascending, in float32 from 0.

    Added to grad (num_rows, D), or to zeros. If sparse, returns the rows, padded with -1; their sums, padded with 0;
    and their number. Float64 is computed in float64.
    """
    dim, pairs = d_o.shape[-1], d_o.flatten(0, 1)
    sums_dtype = torch.promote_types(d_o.dtype, torch.float32)
    ordered, order = torch.sort(indices.flatten(), stable=True)
    is_row = (ordered >= 0) & (ordered < num_rows)
    order = order[is_row]
    rows, lengths = torch.unique_consecutive(ordered[is_row], return_counts=True)
    starts = lengths.cumsum(0) - lengths
    totals = torch.zeros(len(rows), dim, dtype=sums_dtype, device=d_o.device)
    for step in range(int(lengths.max()) if len(rows) else 0):
        has_step = lengths > step
        totals[has_step] += pairs[order[starts[has_step] + step]]
    if sparse:
        padding = indices.numel() - len(rows)
        padded_rows = torch.nn.functional.pad(rows, (0, padding), value=-1)
        values = torch.nn.functional.pad(totals, (0, 0, 0, padding))
        return padded_rows, values, torch.tensor([len(rows)], dtype=torch.int32, device=indices.device)
    if grad is None:
        grad = torch.zeros(num_rows, dim, dtype=sums_dtype, device=d_o.device)
    grad[rows.long()] += totals
    return grad
