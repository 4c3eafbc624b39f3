"""What is where in a rank's buffer, which all ranks write into.

    flags           64 KiB: epochs in words of 4 bytes, and the counts that ranks tell before they send
    dispatched      rows of other ranks' tokens, row source · T + index: data | factors | token, experts, weights
    …
    combined        rows that come back, up to the end, row place · T + token: values | weights, and which slots

Buffers of calls without routing have other data behind the flags: copies.py and fetch.py.

T is num_max_tokens_per_rank. A row is a multiple of 128 bytes, its parts of 16 bytes, called units. `place` is the
number of the rank that sends a row back, or where tokens have fewer slots than there are ranks, or each slot's row
travels, a slot.
"""

from typing import Any, NamedTuple

from tk_core.math import ceil_div
from tk_ep.sizes import FLAG_BYTES, MAX_RANKS, ROW_UNIT, combine_row_bytes, dispatch_row_bytes

UNIT = 16

DISPATCH, COMBINE, BARRIER, GATHER, SEND, RECEIVE = range(6)
OPS = ("dispatch", "combine", "barrier", "all_gather", "pp_send", "pp_recv")

# Words of the flags. The first two have a word for each rank and each op but the last two: the epochs that a rank's
# rows are for, written by that rank, and the epochs in which it has read what this rank sent.
ARRIVED = 0
CREDIT = 32
EPOCH = 64
"""A word for each op: calls that this rank has finished."""
TICKET = 72
"""Thread blocks of the running kernel that are done."""
FAILED = 73
COUNTS = 128
"""Of dispatches of even and odd epochs, as a rank may tell the next counts before all have read these: for each source
L counts of pairs, then the number of its tokens, each in two words behind its epoch."""
PREPARED = 128
"""Instead of counts, where a buffer serves gathers: 32 values of this rank's flag, which copy engines copy to peers."""
SLOTS = 128
"""Instead of counts, where a buffer serves sends: for each slot four times a word for each rank."""
FILLED, FREED, SENT, RECEIVED = range(4)
"""Of a slot: tensors from a rank, written by it; those read there, written by the reader; the rank's own counts."""


def flag_of(first: int, op: int) -> int:
    """The first of an op's words for all ranks."""
    return first + op * MAX_RANKS


def counts_of(epoch: Any, source: Any, num_ranks: int, num_local_experts: int) -> Any:
    """The first word of what a source tells of its counts."""
    return COUNTS + 2 * ((epoch & 1) * num_ranks + source) * (num_local_experts + 1)


def flag_of_slot(slot: int, kind: int) -> int:
    """The first of a slot's words of one kind for all ranks."""
    return SLOTS + (4 * slot + kind) * MAX_RANKS


class TokenRow(NamedTuple):
    """The parts of a dispatched row, in units."""

    data: int
    sf: int
    facts: int
    """The token's index, then for each slot an int32: rank among its source's pairs of that expert · E + expert, or -1;
    then a float32 for each slot, its weight"""

    @property
    def size(self) -> int:
        """Units of a row."""
        return sum(self)


def token_row(x_bytes: int, sf_bytes: int, num_topk: int) -> TokenRow:
    """The parts of a row of `dispatch_row_bytes`."""
    data, sf = ceil_div(x_bytes, UNIT), ceil_div(sf_bytes, UNIT)
    return TokenRow(data, sf, dispatch_row_bytes(x_bytes, sf_bytes, num_topk) // UNIT - data - sf)


class SumRow(NamedTuple):
    """The parts of a combined row, in units."""

    values: int
    facts: int
    """A float32 for each slot, its weight, then an int32 with a bit for each slot that has a row"""

    @property
    def size(self) -> int:
        """Units of a row."""
        return sum(self)


def sum_row(hidden: int, num_topk: int) -> SumRow:
    """The parts of a row of `combine_row_bytes`."""
    values = ceil_div(2 * hidden, UNIT)
    return SumRow(values, combine_row_bytes(hidden, num_topk) // UNIT - values)


FIRST_ROW = FLAG_BYTES // UNIT
"""The unit at which dispatched rows begin."""


def first_combined_row(num_bytes: int, area_bytes: int) -> int:
    """The unit at which combined rows of `area_bytes` begin."""
    return (num_bytes // ROW_UNIT * ROW_UNIT - area_bytes) // UNIT


def places_are_ranks(num_ranks: int, num_topk: int, sum_on_source: bool) -> bool:
    """Whether a combined row's place is a rank, not a slot."""
    return num_ranks <= num_topk and not sum_on_source


def allocated_units(num_bytes: int) -> int:
    """What is allocated for a buffer of num_bytes, with room for the flags at least."""
    return ceil_div(max(num_bytes, FLAG_BYTES), UNIT)
