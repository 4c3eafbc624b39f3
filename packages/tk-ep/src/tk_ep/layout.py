"""Where tokens go and where their rows lie, in plain PyTorch on any device."""

from typing import NamedTuple

import torch
from torch import Tensor

from tk_ep.check import DispatchRequest, DispatchResult
from tk_ep.handle import EPHandle


def bits(x: Tensor) -> Tensor:
    """x as integers of the same size, which can be indexed and sent whatever its dtype."""
    return x.view({1: torch.uint8, 2: torch.int16}[x.element_size()])


def rank_of_slot(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """The rank that has each slot's expert, int64 like topk_idx (T, K); num_ranks for slots without an expert."""
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    return torch.where(is_expert, topk_idx.long() // (num_experts // num_ranks), num_ranks)


def sent_tokens(ranks: Tensor, num_ranks: int) -> Tensor:
    """Whether each token is sent to each rank, bool (T, R), from `rank_of_slot`."""
    sent = torch.zeros((len(ranks), num_ranks + 1), dtype=torch.bool, device=ranks.device)
    return sent.scatter_(1, ranks, True)[:, :num_ranks]


def last_slots(ranks: Tensor, num_ranks: int) -> Tensor:
    """Whether each slot is the token's last one on its rank, bool (T, K), from `rank_of_slot`."""
    is_last = torch.zeros_like(ranks, dtype=torch.bool)
    later = torch.zeros((len(ranks), num_ranks + 1), dtype=torch.bool, device=ranks.device)
    later[:, num_ranks] = True
    for slot in reversed(range(ranks.shape[1])):
        rank = ranks[:, slot, None]
        is_last[:, slot] = ~later.gather(1, rank)[:, 0]
        later.scatter_(1, rank, True)
    return is_last


def dst_buffer_slot_idx(request: DispatchRequest, ranks: Tensor) -> Tensor:
    """The handle's field of this name."""
    num_ranks = request.place.num_ranks
    index = sent_tokens(ranks, num_ranks).long().cumsum(0) - 1
    index = index.gather(1, ranks.clamp(max=num_ranks - 1)) + request.place.rank * request.num_max_tokens_per_rank
    return torch.where(last_slots(ranks, num_ranks), index, -1).int()


def staging_rows(ranks: Tensor, num_ranks: int) -> Tensor:
    """The row of each slot's token among all that this rank sends, by (rank, token): int64 (T, K), any number for slots
    without an expert. `ranks` is from `rank_of_slot`."""
    sent = sent_tokens(ranks, num_ranks).long()
    counts = sent.sum(0)
    rows = sent.cumsum(0) - 1 + counts.cumsum(0) - counts
    return rows.gather(1, ranks.clamp(max=num_ranks - 1))


class Received(NamedTuple):
    """The n tokens that a rank has received, by (source rank, token)."""

    x: Tensor
    """(n, …), as `bits` gives them"""
    sf: Tensor | None
    """(n, S) of the dispatched dtype"""
    topk_idx: Tensor
    """(n, K) global experts; what is outside of 0 … E-1 is none"""
    topk_weights: Tensor | None
    """float32 (n, K)"""
    source: Tensor
    """int64 (n,): source rank"""
    token: Tensor
    """int64 (n,): the token's index on its rank"""


class _Segments(NamedTuple):
    """The rows of a rank's experts."""

    rows: Tensor
    """int64 (n, K): the row of each slot, -1 without one"""
    counts: Tensor
    """int64 (L,): rows with a token"""
    starts: Tensor
    """int64 (L,)"""
    ends: Tensor
    """int64 (L,): where segments end, with padding"""


def _segments(local_idx: Tensor, num_local_experts: int, alignment: int) -> _Segments:
    """A stable counting sort of the (token, slot) pairs by local expert, int64 (n, K), -1 for none."""
    expert = torch.where(local_idx < 0, num_local_experts, local_idx).flatten()
    counts = torch.bincount(expert, minlength=num_local_experts + 1)
    order = expert.argsort(stable=True)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert[order]]
    counts = counts[:num_local_experts]
    sizes = (counts + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    starts = ends - sizes
    rows = torch.where(expert < num_local_experts, starts[expert.clamp(max=num_local_experts - 1)] + index, -1)
    return _Segments(rows.view_as(local_idx), counts, starts, ends)


def receive(request: DispatchRequest, received: Received, dst_slots: Tensor | None) -> DispatchResult:
    """What dispatch returns on a rank that has received these tokens.

    `dst_slots` is `dst_buffer_slot_idx`, for the handle; None where the request has a handle.
    """
    first_expert = request.place.rank * request.num_local_experts
    local_idx = received.topk_idx.long() - first_expert
    local_idx = torch.where((local_idx >= 0) & (local_idx < request.num_local_experts), local_idx, -1)
    segments = _segments(local_idx, request.num_local_experts, request.expert_alignment)
    handle = request.handle
    if handle is not None:
        num_tokens, num_rows = handle.num_recv_tokens, handle.num_expanded_tokens
    elif request.do_cpu_sync:
        num_tokens, num_rows = len(local_idx), int(segments.ends[-1])
    else:
        num_tokens, num_rows = request.max_recv_tokens, request.max_expanded_rows
    if request.do_expand:
        # Only a token with an expert twice has pairs for which no row is left.
        counts = torch.minimum(segments.counts, (num_rows - segments.starts).clamp(min=0))
        segments = segments._replace(rows=torch.where(segments.rows < num_rows, segments.rows, -1), counts=counts)
    if handle is None:
        handle = _handle(request, received, dst_slots, local_idx, segments, num_tokens, num_rows)
        if request.stats is not None:
            request.stats.add_(segments.counts)

    weights = received.topk_weights
    if request.do_expand:
        token, slot = (segments.rows >= 0).nonzero(as_tuple=True)
        row = segments.rows[token, slot]

        def placed(values: Tensor, out: Tensor) -> Tensor:
            out = out.zero_() if request.do_zero_padding else out
            return out.index_copy_(0, row, values.index_select(0, token))

        recv_topk_idx = None
        if weights is not None:
            weights = weights.new_zeros(num_rows).index_put_((row,), weights[token, slot])
    else:
        num_rows = num_tokens

        def placed(values: Tensor, out: Tensor) -> Tensor:
            out[: len(values)] = values
            return out

        empty = request.topk_idx.new_full((num_tokens, local_idx.shape[1]), -1)
        recv_topk_idx = placed(local_idx.to(empty.dtype), empty)
        if weights is not None:
            weights = placed(weights, weights.new_zeros((num_tokens, weights.shape[1])))
    recv_x = received.x
    if request.do_expand or len(recv_x) < num_rows:
        recv_x = placed(recv_x, recv_x.new_empty((num_rows, recv_x.shape[1])))
    recv_x = recv_x.view(request.x.dtype)
    recv_sf = None
    if received.sf is not None:
        shape = num_rows, received.sf.shape[1]
        strides = (1, -(-num_rows // 4) * 4) if request.use_tma_aligned_col_major_sf else (shape[1], 1)
        recv_sf = placed(received.sf, received.sf.new_empty_strided(shape, strides))
    return DispatchResult(recv_x, recv_sf, recv_topk_idx, weights, handle)


def _handle(
    request: DispatchRequest,
    received: Received,
    dst_slots: Tensor,
    local_idx: Tensor,
    segments: _Segments,
    num_tokens: int,
    num_rows: int,
) -> EPHandle:
    num_received, num_topk = local_idx.shape
    slots = torch.arange(num_topk, device=local_idx.device)
    last_slot = torch.where(local_idx >= 0, slots, -1).amax(1)
    metadata = torch.full((num_tokens, 2 + num_topk), -1, dtype=torch.int32, device=local_idx.device)
    metadata[:num_received, 0] = (received.source * request.num_max_tokens_per_rank + received.token).int()
    metadata[:num_received, 1] = (received.source * num_topk + last_slot).int()
    pos_to_expert = None
    if request.do_expand:
        metadata[:num_received, 2:] = segments.rows.int()
        pos_to_expert = torch.full((num_rows,), -1, dtype=torch.int32, device=local_idx.device)
        pos_to_expert[segments.rows[segments.rows >= 0]] = local_idx[segments.rows >= 0].int()
    sizes = segments.ends - segments.starts
    psum = segments.starts.clamp(max=num_rows) + segments.counts if request.do_expand else segments.ends
    tokens_of_ranks = torch.bincount(received.source, minlength=request.place.num_ranks)
    return request.new_handle(
        request.topk_idx.clone() if request.do_handle_copy else request.topk_idx,
        num_recv_tokens=num_tokens,
        num_expanded_tokens=num_rows,
        num_recv_tokens_per_expert_list=sizes.tolist() if request.do_cpu_sync else [],
        psum_num_recv_tokens_per_scaleup_rank=tokens_of_ranks.cumsum(0).int(),
        psum_num_recv_tokens_per_expert=psum.int(),
        num_unaligned_recv_tokens_per_expert=segments.counts.int(),
        recv_src_metadata=metadata,
        dst_buffer_slot_idx=dst_slots,
        pos_to_expert=pos_to_expert,
    )
