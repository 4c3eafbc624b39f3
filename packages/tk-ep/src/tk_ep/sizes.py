"""Sizes of results and of a buffer's memory."""

from tk_core.math import align, ceil_div

MAX_RANKS = 8
"""Of the symmetric backend"""
MAX_EXPERTS = 1024
MAX_TOPK = 32
MAX_SLOTS = 256
"""Tensors on their way to a neighbour: the symmetric backend has flags for each"""
FLAG_BYTES = 64 << 10
_PAGE = 2 << 20
ROW_UNIT = 128
"""Rows in a buffer begin at multiples of so many bytes: bulk copies are slower to and from other addresses."""


def max_recv_tokens(num_ranks: int, num_max_tokens_per_rank: int) -> int:
    """The most tokens that a rank receives."""
    return num_ranks * num_max_tokens_per_rank


def max_expanded_rows(
    num_ranks: int, num_max_tokens_per_rank: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """The most rows that the segments of a rank's experts take, if no token has an expert twice."""
    pairs = max_recv_tokens(num_ranks, num_max_tokens_per_rank) * min(num_topk, num_local_experts)
    return align(pairs + (alignment - 1) * num_local_experts, alignment)


def dispatch_row_bytes(x_bytes: int, sf_bytes: int, num_topk: int) -> int:
    """Bytes of a dispatched token in a buffer, to 128: data and factors, each to 16 bytes, for each slot an expert and
    a weight, and the token's index."""
    return align(align(x_bytes, 16) + align(sf_bytes, 16) + 8 * num_topk + 4, ROW_UNIT)


def combine_row_bytes(hidden: int, num_topk: int) -> int:
    """Bytes of a row on its way back, to 128: bfloat16 values, a weight for each slot, and which slots have rows."""
    return align(align(2 * hidden, 16) + 4 * num_topk + 4, ROW_UNIT)


def dispatch_area_bytes(num_ranks: int, num_max_tokens_per_rank: int, row_bytes: int) -> int:
    """Bytes of the rows that all ranks may dispatch to one."""
    return num_ranks * num_max_tokens_per_rank * row_bytes


def combine_area_bytes(
    num_ranks: int, num_max_tokens_per_rank: int, hidden: int, num_topk: int, allow_multiple_reduction: bool
) -> int:
    """Bytes of the rows that a rank's tokens may get back: one from each rank, or from each slot."""
    rows_per_token = min(num_ranks, num_topk) if allow_multiple_reduction else num_topk
    return rows_per_token * num_max_tokens_per_rank * combine_row_bytes(hidden, num_topk)


def with_flags(num_bytes: int) -> int:
    """Bytes of a buffer with room for num_bytes beside the flags, to 2 MiB."""
    return align(num_bytes + FLAG_BYTES, _PAGE)


def buffer_bytes(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Bytes of a buffer for dispatches and combines of tokens with `hidden` channels, to 2 MiB.

    num_topk 0 stands for the most slots, 32. FP8 rows have four bytes of factors for 128 channels.
    """
    num_topk = num_topk or MAX_TOPK
    data, factors = (hidden, 4 * ceil_div(hidden, 128)) if use_fp8_dispatch else (2 * hidden, 0)
    row_bytes = dispatch_row_bytes(data, factors, num_topk)
    dispatched = dispatch_area_bytes(num_ranks, num_max_tokens_per_rank, row_bytes)
    combined = combine_area_bytes(num_ranks, num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction)
    return with_flags(dispatched + combined)


class BufferSpace:
    """Which of a buffer's bytes its calls take.

    A buffer serves one of several uses. For dispatch and combine, dispatched rows are at the start, combined ones at
    the end; each area is as large as the largest call so far needed it, and both have to fit beside the flags.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.dispatch_bytes = 0
        self.combine_bytes = 0
        self._use: str | None = None

    def claim(self, dispatch_bytes: int = 0, combine_bytes: int = 0) -> None:
        """Enlarge the areas to at least these bytes. Raises, and changes nothing, as `serve` does."""
        dispatch_bytes = max(self.dispatch_bytes, dispatch_bytes)
        combine_bytes = max(self.combine_bytes, combine_bytes)
        parts = f"dispatches take {dispatch_bytes}, combines {combine_bytes}"
        self.serve("dispatch and combine", dispatch_bytes + combine_bytes, parts)
        self.dispatch_bytes, self.combine_bytes = dispatch_bytes, combine_bytes

    def serve(self, use: str, num_bytes: int, parts: str) -> None:
        """Keep the buffer for this use.

        Raises ValueError, which says the `parts`, if num_bytes don't fit; RuntimeError if it is in another use.
        """
        if self._use not in (None, use):
            raise RuntimeError(f"{use}: this buffer serves {self._use}; each use needs a buffer of its own")
        needed = num_bytes + FLAG_BYTES
        if needed > self.num_bytes:
            raise ValueError(
                f"num_bytes: expected a buffer of {needed} bytes ({parts}, flags {FLAG_BYTES}), got {self.num_bytes}"
            )
        self._use = use
