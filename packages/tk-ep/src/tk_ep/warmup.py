"""The calls that a model with its experts on several GPUs makes to the symmetric backend, for `tk warmup`."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from tk_core.cli.profile import Call, call, empty
from tk_core.math import ceil_div
from tk_ep.all_ranks import combine_requests, dispatch_requests
from tk_ep.handle import EPHandle, Place
from tk_ep.sizes import buffer_bytes
from tk_ep.symmetric.memory import allocated_units
from tk_ep.symmetric.rank import Rank


@dataclass(frozen=True)
class Profile:
    """Section [tk_ep] of a model's profile."""

    hidden: int
    num_experts: int
    """Of all ranks together."""
    num_topk: int
    num_ranks: tuple[int, ...]
    """Numbers of GPUs that the experts may be spread over; empty for none."""
    indices: tuple[Literal["int64", "int32"], ...] = ("int64",)
    rows: tuple[Literal["bfloat16", "e4m3", "e2m1"], ...] = ("bfloat16",)
    """Formats of dispatched tokens; e4m3 and e2m1 have scale factors."""
    num_per_channels: tuple[Literal[32, 128], ...] = (128,)
    """Channels of one scale factor."""
    sf_layouts: tuple[Literal["row_major", "col_major", "packed_ue8m0"], ...] = ("row_major",)
    expanded: tuple[bool, ...] = (True,)
    """Whether dispatch is called with do_expand, and do_zero_padding."""
    multiple_reduction: tuple[bool, ...] = (True,)
    """Whether buffers have allow_multiple_reduction."""
    num_biases: tuple[Literal[0, 1, 2], ...] = (0,)
    """Tensors that combine adds to its sums."""
    counts_experts: tuple[bool, ...] = (False,)
    """Whether dispatch is given cumulative_local_expert_recv_stats."""
    copies: bool = False
    """Whether all_gather, pp_send or pp_recv are called."""
    entry_bytes: tuple[int, ...] = ()
    """Bytes of an entry, multiples of 16, that engram_fetch fetches."""
    training: bool = False
    """Whether the backwards are called too, with bfloat16 gradients."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """A rank's calls with their arguments on the meta device, for a batch of `num_tokens` tokens on it."""
    d_y, weights = empty(num_tokens, profile.hidden, dtype="bfloat16"), empty(num_tokens, profile.num_topk)
    for num_ranks in profile.num_ranks:
        rank = _rank(profile, num_ranks, num_tokens)
        yield call(barrier, rank)
        if profile.copies:
            yield call(copy, rank)
        for num_bytes in profile.entry_bytes:
            yield call(fetch, rank, num_bytes, num_tokens)
        for idx_dtype, do_expand in product(profile.indices, profile.expanded):
            topk_idx = empty(num_tokens, profile.num_topk, dtype=idx_dtype)
            routing = topk_idx, weights, profile.num_experts, do_expand
            for x, counts in product(_tokens(profile, num_tokens), profile.counts_experts):
                stats = empty(profile.num_experts // num_ranks, dtype=torch.int32) if counts else None
                yield call(dispatch, rank, x, *routing, stats)
            earlier = x, *routing, stats
            for reduces, num_biases in product(profile.multiple_reduction, profile.num_biases):
                yield call(combine, rank, earlier, profile.hidden, reduces, num_biases, False)
            if profile.training:
                yield call(dispatch, rank, d_y, None, None, None, do_expand, None, earlier)
                for reduces in profile.multiple_reduction:
                    yield call(combine, rank, earlier, profile.hidden, reduces, 0, True)


def dispatch(
    rank: Rank,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    num_experts: int | None,
    do_expand: bool,
    stats: Tensor | None,
    earlier: tuple[Any, ...] | None = None,
) -> EPHandle:
    """What a rank launches for a dispatch; with the arguments of an earlier one, for both, as this takes its handle."""
    handle = None if earlier is None else dispatch(rank, *earlier)
    given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "handle": handle}
    given["cumulative_local_expert_recv_stats"] = stats
    options = {"num_experts": num_experts, "do_expand": do_expand, "do_zero_padding": do_expand, "do_cpu_sync": False}
    options["use_tma_aligned_col_major_sf"] = isinstance(x, tuple)  # which takes one kernel more
    num_tokens = len(x[0] if isinstance(x, tuple) else x)
    (request,) = dispatch_requests([rank.place], max(num_tokens, 1), _of_one_rank(given), options)
    started = rank.push_tokens(request)
    rank.count(started, 1.0)
    return rank.receive(started).handle


def combine(
    rank: Rank,
    earlier: tuple[Any, ...],
    hidden: int,
    allow_multiple_reduction: bool,
    num_biases: int,
    with_weights: bool,
) -> None:
    """What a rank launches for a combine, and for the earlier dispatch."""
    handle = dispatch(rank, *earlier)
    num_tokens, num_topk = handle.topk_idx.shape
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    given = {"x": empty(num_rows, hidden, dtype="bfloat16"), "handle": handle, "topk_weights": None}
    given["bias"] = (empty(num_tokens, hidden, dtype="bfloat16"),) * num_biases
    if with_weights:
        given["topk_weights"] = empty(num_rows) if handle.do_expand else empty(num_rows, num_topk)
    (request,) = combine_requests([rank.place], _of_one_rank(given), 0, allow_multiple_reduction)
    started = rank.push_rows(request)
    rank.wait(started)
    rank.sum(started)


def barrier(rank: Rank) -> None:
    """What a rank launches for a barrier."""
    rank.barrier()


def copy(rank: Rank) -> None:
    """What a rank launches for a call that copies to peers: the same for all."""
    rank.exchange()


def fetch(rank: Rank, num_bytes: int, num_tokens: int) -> None:
    """What a rank launches to fetch entries."""
    rank.fetch(empty(1, num_bytes, dtype=torch.int8), empty(num_tokens, 1, dtype=torch.int32))


def _of_one_rank(given: dict[str, Any]) -> dict[str, list[Any] | None]:
    return {name: None if value is None else [value] for name, value in given.items()}


def _rank(profile: Profile, num_ranks: int, num_tokens: int) -> Rank:
    num_bytes = buffer_bytes(num_ranks, max(num_tokens, 1), profile.hidden, profile.num_topk, False, False)
    buffers = tuple(empty(allocated_units(num_bytes), 4, dtype=torch.int32) for _ in range(num_ranks))
    return Rank(Place(None, 0, num_ranks, buffers[0].device), buffers, num_bytes, 24, 1.0)


def _tokens(profile: Profile, num_tokens: int) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
    for row_format in profile.rows:
        if row_format == "bfloat16":
            yield empty(num_tokens, profile.hidden, dtype="bfloat16")
            continue
        cols, dtype = (profile.hidden, "float8_e4m3fn") if row_format == "e4m3" else (profile.hidden // 2, "int8")
        data = empty(num_tokens, cols, dtype=dtype)
        for num_per_channels, layout in product(profile.num_per_channels, profile.sf_layouts):
            num_factors = ceil_div(profile.hidden, num_per_channels)
            packed = layout == "packed_ue8m0"
            yield data, empty(num_tokens, ceil_div(num_factors, 4) if packed else num_factors)
