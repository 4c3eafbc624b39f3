"""Combine of all ranks in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tk_ep.all_ranks import Combined, combine_requests, combined
from tk_ep.check import CombineRequest, CombineResult
from tk_ep.handle import EPHandle
from tk_ep.layout import last_slots, rank_of_slot


@torch.no_grad()
def combine(
    x: Sequence[Tensor],
    handle: Sequence[EPHandle],
    topk_weights: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor | Sequence[Tensor] | None] | None = None,
    num_sms: int = 0,
    *,
    allow_multiple_reduction: bool = True,
) -> Combined:
    """`ElasticBuffer.combine` of all ranks: arguments of tensors and handles are lists with an item for each rank.

    Returns (combined_x, combined_topk_weights), lists or None.
    """
    lists = {"x": x, "handle": handle, "topk_weights": topk_weights, "bias": bias}
    places = [each.place for each in handle]
    return combined(combine_results(combine_requests(places, lists, num_sms, allow_multiple_reduction)))


def combine_results(requests: list[CombineRequest]) -> list[CombineResult]:
    """What each rank's combine returns."""
    return [
        CombineResult(_sum(requests, rank), None if each.topk_weights is None else _weights(requests, rank))
        for rank, each in enumerate(requests)
    ]


def _index_on(request: CombineRequest, source: int) -> Tensor:
    """The index of each token of rank `source` among those that the request's rank received, -1 for others."""
    handle = request.handle
    most = handle.num_max_tokens_per_rank
    index = torch.full((handle.place.num_ranks * most,), -1, device=request.x.device)
    ids = handle.recv_src_metadata[:, 0].long()
    received = (ids >= 0).nonzero()[:, 0]
    index[ids[received]] = received
    return index[source * most :][:most]


def _sum(requests: list[CombineRequest], source: int) -> Tensor:
    """The sum of the rows of each token of a rank: slots in ascending order, rounded on each rank or once."""
    own = requests[source]
    handle, num_ranks = own.handle, own.handle.place.num_ranks
    num_tokens, num_topk = handle.topk_idx.shape
    ranks = rank_of_slot(handle.topk_idx, handle.num_experts, num_ranks)
    is_last = last_slots(ranks, num_ranks)
    out = own.x.new_zeros((num_tokens, own.x.shape[1]), dtype=torch.float32)
    for bias in own.bias:
        out = out + bias.float()
    # For each rank, the sum of the rows that have come up there.
    partial = [torch.zeros_like(out) for _ in requests]
    indices = [_index_on(each, source)[:num_tokens] for each in requests]
    for slot in range(num_topk):
        for rank, there in enumerate(requests):
            index = indices[rank]
            here = ranks[:, slot] == rank
            if handle.do_expand:
                row = there.handle.recv_src_metadata[index[here], 2 + slot].long()
            else:
                here &= is_last[:, slot]
                row = index[here]
            tokens = here.nonzero()[:, 0][row >= 0]
            terms = there.x[row[row >= 0]].float()
            if own.sum_on_source:
                out[tokens] += terms
                continue
            partial[rank][tokens] += terms
            done = (here & is_last[:, slot]).nonzero()[:, 0]
            out[done] += partial[rank][done].bfloat16().float()
    return out.bfloat16()


def _weights(requests: list[CombineRequest], source: int) -> Tensor:
    """The weight of each slot of a rank's tokens from the rank of its expert, else 0."""
    handle = requests[source].handle
    num_tokens, num_topk = handle.topk_idx.shape
    ranks = rank_of_slot(handle.topk_idx, handle.num_experts, handle.place.num_ranks)
    out = torch.zeros((num_tokens, num_topk), device=ranks.device)
    for rank, there in enumerate(requests):
        token, slot = (ranks == rank).nonzero(as_tuple=True)
        index = _index_on(there, source)[token]
        if handle.do_expand:
            row = there.handle.recv_src_metadata[index, 2 + slot].long()
            token, slot, row = (each[row >= 0] for each in (token, slot, row))
            out[token, slot] = there.topk_weights[row]
        else:
            out[token, slot] = there.topk_weights[index, slot]
    return out
