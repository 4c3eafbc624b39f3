"""Reference of engram_lookup."""

import torch
from torch import Tensor

from tk_core.reference.scales import decode_ue8m0


def engram_lookup(
    indices: Tensor, table: Tensor, *, table_sf: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """out[t, c] = table[indices[t, c]], times its scale for an e4m3 table; zeros where there is no such row.

    indices (T, C) and table (R, D) -> (T, C, D), on the device of the indices: bfloat16, or the dtype of a float32 or
    float64 table. table_sf (R, D / 32): uint8 exponents or float32. Products are rounded to float32, then to bfloat16.
    """
    rows = indices.long().to(table.device)
    is_row = (rows >= 0) & (rows < table.shape[0])
    rows = torch.where(is_row, rows, 0)
    if table.dtype is torch.float8_e4m3fn:
        codes = table.view(torch.uint8)[rows].view(table.dtype).float()
        sf = table_sf[rows]
        sf = decode_ue8m0(sf) if sf.dtype is torch.uint8 else sf
        values = (codes.unflatten(-1, (-1, 32)) * sf.unsqueeze(-1)).flatten(-2).bfloat16()
    else:
        values = table[rows]
    values = torch.where(is_row.unsqueeze(-1), values, 0).to(indices.device)
    return values if out is None else out.copy_(values)
