"""Dispatch of all ranks in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_ep.all_ranks import Dispatched, Pair, dispatch_requests, dispatched
from tk_ep.check import DispatchRequest, DispatchResult
from tk_ep.handle import EPHandle, Place
from tk_ep.layout import Received, bits, dst_buffer_slot_idx, rank_of_slot, receive, sent_tokens


class Ranks:
    """The group of the ranks of one reference: what their handles have in common."""


@torch.no_grad()
def dispatch(
    x: Sequence[Tensor | Pair],
    topk_idx: Sequence[Tensor] | None = None,
    topk_weights: Sequence[Tensor] | None = None,
    cumulative_local_expert_recv_stats: Sequence[Tensor] | None = None,
    num_experts: int | None = None,
    num_max_tokens_per_rank: int | None = None,
    expert_alignment: int | None = None,
    num_sms: int = 0,
    *,
    handle: Sequence[EPHandle] | None = None,
    do_handle_copy: bool = True,
    do_cpu_sync: bool | None = None,
    do_expand: bool = False,
    do_zero_padding: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
) -> Dispatched:
    """`ElasticBuffer.dispatch` of all ranks: arguments of tensors and handles are lists with an item for each rank.

    Returns (recv_x, recv_topk_idx, recv_topk_weights, handles), lists or None. Rows of which the result is unspecified
    hold anything. num_max_tokens_per_rank is by default the handle's, or the most tokens that a rank has.
    """
    num_ranks = len(x)
    most = max(1, *(len(each[0] if isinstance(each, tuple) else each) for each in x))
    group = Ranks() if handle is None else handle[0].place.group
    places = [
        Place(group, rank, num_ranks, (each[0] if isinstance(each, tuple) else each).device)
        for rank, each in enumerate(x)
    ]
    lists = {
        "x": x,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats,
        "handle": handle,
    }
    options = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "expert_alignment": expert_alignment,
        "num_sms": num_sms,
        "do_handle_copy": do_handle_copy,
        "do_cpu_sync": do_cpu_sync,
        "do_expand": do_expand,
        "do_zero_padding": do_zero_padding,
        "use_tma_aligned_col_major_sf": use_tma_aligned_col_major_sf,
    }
    return dispatched(dispatch_results(dispatch_requests(places, most, lists, options)))


def dispatch_results(requests: list[DispatchRequest]) -> list[DispatchResult]:
    """What each rank's dispatch returns."""
    return [_dispatch_to(requests, rank) for rank in range(len(requests))]


def _dispatch_to(requests: list[DispatchRequest], rank: int) -> DispatchResult:
    """What this rank returns: of all ranks' tokens, one below the other, it receives those with an expert here."""
    own = requests[rank]
    num_ranks = own.place.num_ranks
    ranks = [rank_of_slot(each.topk_idx, each.num_experts, num_ranks) for each in requests]
    received = torch.cat([sent_tokens(each, num_ranks)[:, rank] for each in ranks])

    def of_all(name: str) -> Tensor | None:
        values = [getattr(each, name) for each in requests]
        return None if values[rank] is None else torch.cat(values)[received]

    sources = [torch.full((len(each),), source, device=each.device) for source, each in enumerate(ranks)]
    tokens = [torch.arange(len(each), device=each.device) for each in ranks]
    tokens_here = Received(
        torch.cat([bits(each.x) for each in requests])[received],
        of_all("sf"),
        of_all("topk_idx"),
        of_all("topk_weights"),
        torch.cat(sources)[received],
        torch.cat(tokens)[received],
    )
    return receive(own, tokens_here, dst_buffer_slot_idx(own, ranks[rank]))
