"""Calls of all ranks in one process: arguments of tensors and handles are lists with an item for each rank."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from tk_core import check
from tk_ep.check import (
    CombineRequest,
    CombineResult,
    DispatchRequest,
    DispatchResult,
    check_combine,
    check_dispatch,
)
from tk_ep.handle import EPHandle, Place

Pair = tuple[Tensor, Tensor]
Dispatched = tuple[list[Tensor | Pair], list[Tensor] | None, list[Tensor] | None, list[EPHandle]]
Combined = tuple[list[Tensor], list[Tensor] | None]
Request = TypeVar("Request", DispatchRequest, CombineRequest)


def dispatch_requests(
    places: Sequence[Place], num_max_tokens_per_rank: int, lists: dict[str, Any], options: dict[str, Any]
) -> list[DispatchRequest]:
    """The checked arguments of each rank's dispatch: `lists` have an item a rank or are None, `options` are for all."""
    return _alike(
        [
            check_dispatch(place, num_max_tokens_per_rank, **items, **options)
            for place, items in zip(places, _items_of_ranks(lists, len(places)))
        ]
    )


def combine_requests(
    places: Sequence[Place], lists: dict[str, Any], num_sms: int, allow_multiple_reduction: bool
) -> list[CombineRequest]:
    """The checked arguments of each rank's combine."""
    options = {"num_sms": num_sms, "allow_multiple_reduction": allow_multiple_reduction}
    return _alike(
        [check_combine(place, **items, **options) for place, items in zip(places, _items_of_ranks(lists, len(places)))]
    )


def _items_of_ranks(lists: dict[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    for name, each in lists.items():
        if each is not None:
            check.require_type(isinstance(each, tuple | list), name, "a list with an item for each rank", each)
            check.require(len(each) == num_ranks, name, "{} items", len(each), num_ranks)
    return [{name: None if each is None else each[rank] for name, each in lists.items()} for rank in range(num_ranks)]


def _alike(requests: list[Request]) -> list[Request]:
    """The requests. Raises ValueError where ranks differ in what has to be equal."""
    facts = requests[0].facts()
    for request in requests:
        for name, value in request.facts().items():
            check.require(value == facts[name], name, "the same on all ranks, {} on rank 0", value, facts[name])
    return requests


def dispatched(results: Sequence[DispatchResult]) -> Dispatched:
    """What a dispatch of all ranks returns."""
    recv_x = [each.recv_x if each.recv_sf is None else (each.recv_x, each.recv_sf) for each in results]
    recv_topk_idx, recv_topk_weights = (
        None if getattr(results[0], name) is None else [getattr(each, name) for each in results]
        for name in ("recv_topk_idx", "recv_topk_weights")
    )
    return recv_x, recv_topk_idx, recv_topk_weights, [each.handle for each in results]


def combined(results: Sequence[CombineResult]) -> Combined:
    """What a combine of all ranks returns."""
    weights = None if results[0].combined_topk_weights is None else [each.combined_topk_weights for each in results]
    return [each.combined_x for each in results], weights
