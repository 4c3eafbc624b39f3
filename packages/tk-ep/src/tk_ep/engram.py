"""A table of which each rank has a part, over the group's collectives: a rank asks the others for rows."""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import align
from tk_ep.check import check_factors
from tk_ep.collective import exchange
from tk_ep.handle import Place


class Storage(NamedTuple):
    """The entries of a rank, and the scale factors of all."""

    rows: Tensor
    """(n, H) of rank r's entries r · n … r · n + n - 1"""
    sf: Tensor | None
    """(R · n, S) of 4-byte elements"""

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return {
            "rows of storage": len(self.rows),
            "bytes of a row of storage": self.rows[:1].nbytes,
            "columns of sf": -1 if self.sf is None else self.sf.shape[1],
        }


class FetchRequest(NamedTuple):
    """The checked arguments of a fetch."""

    indices: Tensor
    """int32 (T, m)"""
    use_tma_aligned_col_major_sf: bool

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks: nothing."""
        return {}


def check_storage(place: Place, storage: Any, sf: Any) -> Storage:
    """The arguments of engram_write. Raises TypeError or ValueError, which name what is wrong."""
    check.plain("storage", storage)
    num_rows, _ = check.tensor("storage", storage, (storage.dtype,), ("num_entries", "hidden"), device=place.device)
    check.require(num_rows > 0, "storage", "an entry at least", num_rows)
    row_bytes = storage[0].nbytes
    check.require(
        row_bytes > 0 and row_bytes % 16 == 0, "storage", "rows of a positive multiple of 16 bytes", row_bytes
    )
    most = place.num_ranks * num_rows
    check.require(most < 2**31, "storage", "fewer than 2**31 entries of all ranks", most)
    if sf is not None:
        check_factors("sf", sf, most, place.device)
    return Storage(storage, sf)


def check_fetch(place: Place, storage: Storage, indices: Any, use_tma_aligned_col_major_sf: Any) -> FetchRequest:
    """The arguments of engram_fetch. Raises TypeError or ValueError, which name what is wrong."""
    check.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    wanted = "num_tokens", "num_entries_per_token"
    check.tensor("indices", indices, (torch.int32,), wanted, device=place.device)
    num_entries = place.num_ranks * len(storage.rows)
    check.below("indices", indices, num_entries, "entries below {}")
    if check.reads_data(indices) and indices.numel():
        check.require(int(indices.min()) >= 0, "indices", "no negative entries", int(indices.min()))
    return FetchRequest(indices, use_tma_aligned_col_major_sf)


def fetch(place: Place, storage: Storage, request: FetchRequest, limit: timedelta) -> tuple[Tensor, Tensor | None]:
    """The rows of the entries, (T, m · H), and their factors, (T, m · S). Indices of no entry get zeros. Collective."""
    (num_tokens, num_each), num_rows = request.indices.shape, len(storage.rows)
    entries = request.indices.flatten().long()
    asked = ((entries >= 0) & (entries < place.num_ranks * num_rows)).nonzero()[:, 0]
    owners = entries[asked] // num_rows
    # Those of rank 0 first, as they are sent.
    asked = asked[owners.argsort(stable=True)]
    send = torch.bincount(owners, minlength=place.num_ranks)
    ones = [1] * place.num_ranks
    (recv,) = exchange(place, limit, "engram_fetch", ones, ones, send[:, None])
    send, recv = send.tolist(), recv[:, 0].tolist()
    (wanted,) = exchange(place, limit, "engram_fetch", send, recv, (entries[asked] % num_rows)[:, None])
    table = storage.rows.view(torch.uint8)
    (rows,) = exchange(place, limit, "engram_fetch", recv, send, table.index_select(0, wanted[:, 0]))
    out = table.new_zeros((len(entries), table.shape[1])).index_copy_(0, asked, rows)
    out = out.view(storage.rows.dtype).view(num_tokens, num_each * storage.rows.shape[1])
    if storage.sf is None:
        return out, None
    num_factors = storage.sf.shape[1]
    factors = storage.sf.new_zeros((len(entries), num_factors))
    factors = factors.index_copy_(0, asked, storage.sf.index_select(0, entries[asked]))
    factors = factors.view(num_tokens, num_each * num_factors)
    if request.use_tma_aligned_col_major_sf:
        strides = 1, align(num_tokens, 4)
        factors = factors.new_empty_strided(factors.shape, strides).copy_(factors)
    return out, factors
