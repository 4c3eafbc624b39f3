"""Dispatch of all ranks in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_ep.check import DispatchRequest, DispatchResult, check_dispatch
from tk_ep.handle import EPHandle, Place
from tk_ep.layout import Received, bits, dst_buffer_slot_idx, rank_of_slot, receive, sent_tokens

Pair = tuple[Tensor, Tensor]


class Ranks:
    """The group of the ranks of one reference: what their handles have in common."""


def of_rank(values: Sequence[Tensor] | None, rank: int) -> Tensor | None:
    """An item of an optional list."""
    return None if values is None else values[rank]


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
) -> tuple[list[Tensor | Pair], list[Tensor] | None, list[Tensor] | None, list[EPHandle]]:
    """`ElasticBuffer.dispatch` of all ranks: arguments of tensors and handles are lists with an item for each rank.

    Returns (recv_x, recv_topk_idx, recv_topk_weights, handles), lists or None. Rows of which the result is unspecified
    hold anything. num_max_tokens_per_rank is by default the handle's, or the most tokens that a rank has.
    """
    num_ranks = len(x)
    most = max(1, *(len(each[0] if isinstance(each, tuple) else each) for each in x))
    group = Ranks() if handle is None else handle[0].place.group
    requests = [
        check_dispatch(
            Place(group, rank, num_ranks, (x[rank][0] if isinstance(x[rank], tuple) else x[rank]).device),
            most,
            x=x[rank],
            topk_idx=of_rank(topk_idx, rank),
            topk_weights=of_rank(topk_weights, rank),
            cumulative_local_expert_recv_stats=of_rank(cumulative_local_expert_recv_stats, rank),
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms,
            handle=None if handle is None else handle[rank],
            do_handle_copy=do_handle_copy,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        for rank in range(num_ranks)
    ]
    results = [_dispatch_to(requests, rank) for rank in range(num_ranks)]
    recv_x = [each.recv_x if each.recv_sf is None else (each.recv_x, each.recv_sf) for each in results]
    recv_topk_idx = None if do_expand else [each.recv_topk_idx for each in results]
    recv_topk_weights = None if topk_weights is None else [each.recv_topk_weights for each in results]
    return recv_x, recv_topk_idx, recv_topk_weights, [each.handle for each in results]


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
