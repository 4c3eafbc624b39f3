"""A table of which each rank has a part: what engram_write and engram_fetch take and return."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import align
from tk_ep.check import check_factors
from tk_ep.handle import Place


class Storage(NamedTuple):
    """The entries of a rank, and the scale factors of all."""

    rows: Tensor
    """(n, H) of rank r's entries r · n … r · n + n - 1"""
    sf: Tensor | None
    """(R · n, S) of 4-byte elements"""

    def copied_to(self, rows: Tensor) -> "Storage":
        """A copy with these rows, which get the values of its own."""
        return Storage(rows.copy_(self.rows), None if self.sf is None else self.sf.clone())

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

    def joined(self, rows: Tensor) -> Tensor:
        """Rows of the entries, (T · m, …), as (T, m · …)."""
        num_tokens, num_each = self.indices.shape
        return rows.view(num_tokens, num_each * rows.shape[1])


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


def fetched_factors(storage: Storage, request: FetchRequest) -> Tensor | None:
    """The factors of the entries, (T, m · S), in the layout asked for; zeros for indices of no entry."""
    if storage.sf is None:
        return None
    num_entries, indices = len(storage.sf), request.indices.flatten().long()
    is_entry = (indices >= 0) & (indices < num_entries)
    factors = storage.sf.view(torch.int32)[indices.clamp(0, num_entries - 1)] * is_entry[:, None]
    factors = request.joined(factors.view(storage.sf.dtype))
    if request.use_tma_aligned_col_major_sf:
        strides = 1, align(len(factors), 4)
        factors = factors.new_empty_strided(factors.shape, strides).copy_(factors)
    return factors
