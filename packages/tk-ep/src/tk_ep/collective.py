"""All calls by the group's own collectives: NCCL between GPUs and across hosts, gloo on CPUs.

A token is sent once to each rank that has one of its experts. Ranks exchange how many, then the rows:

    dispatch   data, factors, and (token, experts, weights) as int32     source rank → experts' rank
    combine    sums of a token's rows, or with sum_on_source all rows    experts' rank → source rank

Rows travel in the order (rank, token) on the source, which is (source rank, token) on the receiver. They are sent as
bytes, as gloo knows fewer dtypes than torch. The host waits for each exchange.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tk_ep.all_gather import CollectiveGathering
from tk_ep.check import CombineRequest, CombineResult, DispatchRequest, DispatchResult
from tk_ep.consensus import waiting_for_peers
from tk_ep.engram import FetchRequest, Storage, fetched_factors
from tk_ep.handle import EPHandle, Place
from tk_ep.layout import Received, bits, dst_buffer_slot_idx, rank_of_slot, receive, sent_tokens, staging_rows
from tk_ep.pipeline import CollectivePipes, SlotSizes


class CollectiveBackend:
    """Serves a buffer by `all_to_all_single` of its group. A call ends when this rank has what it needs."""

    name = "collective"
    supports_capture = False

    def __init__(self, place: Place, limit: timedelta) -> None:
        self._place = place
        self._limit = limit
        self._exchange = partial(exchange, place, limit)

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """See `tk_ep.backend.Backend`."""
        num_ranks = self._place.num_ranks
        ranks = rank_of_slot(request.topk_idx, request.num_experts, num_ranks)
        sent = sent_tokens(ranks, num_ranks)
        token = sent.t().nonzero()[:, 1]
        send = sent.sum(0)
        if request.handle is not None:
            recv = _recv_counts(request.handle)
        else:
            (recv,) = self._exchange("dispatch", [1] * num_ranks, [1] * num_ranks, send[:, None])
            recv = recv[:, 0]
        source = torch.arange(num_ranks, device=recv.device).repeat_interleave(recv)

        weights, num_topk = request.topk_weights, ranks.shape[1]
        own_tokens = torch.arange(len(ranks), dtype=torch.int32, device=ranks.device)
        facts = [own_tokens[:, None], torch.where(ranks < num_ranks, request.topk_idx, -1).int()]
        facts += [] if weights is None else [weights.view(torch.int32)]
        rows = [torch.cat(facts, 1), bits(request.x)] + ([] if request.sf is None else [request.sf])
        sent_rows = [each.index_select(0, token) for each in rows]
        received, x, *sf = self._exchange("dispatch", send.tolist(), recv.tolist(), *sent_rows)
        if request.previous_event_before_epilogue is not None:
            request.previous_event_before_epilogue.current_stream_wait()
        tokens_here = Received(
            x=x,
            sf=sf[0] if sf else None,
            topk_idx=received[:, 1 : 1 + num_topk],
            topk_weights=None if weights is None else received[:, 1 + num_topk :].view(torch.float32),
            source=source,
            token=received[:, 0].long(),
        )
        return receive(request, tokens_here, None if request.handle else dst_buffer_slot_idx(request, ranks))

    def combine(self, request: CombineRequest) -> CombineResult:
        """See `tk_ep.backend.Backend`."""
        x, handle, num_ranks = request.x, request.handle, self._place.num_ranks
        ranks = rank_of_slot(handle.topk_idx, handle.num_experts, num_ranks)
        # What went out comes back, in the same order.
        send, back = _recv_counts(handle).tolist(), sent_tokens(ranks, num_ranks).sum(0).tolist()
        rows = handle.recv_src_metadata[: sum(send), 2:].long()
        staged = torch.where(ranks < num_ranks, staging_rows(ranks, num_ranks), -1)

        weights = () if request.topk_weights is None else (request.topk_weights[: sum(send)],)
        if weights and handle.do_expand:
            weights = (_at_slots(request.topk_weights[:, None].expand(-1, rows.shape[1]), rows, 0.0),)
        if request.sum_on_source:
            has_row = rows >= 0
            returns, *weights = self._exchange("combine", send, back, has_row.byte(), *weights)
            returns = returns.bool()
            send_rows, back_rows = (
                [int(each.sum()) for each in has.split(splits)] for has, splits in ((has_row, send), (returns, back))
            )
            (returned,) = self._exchange("combine", send_rows, back_rows, x.index_select(0, rows[has_row]))
            returned_row = torch.where(returns, returns.flatten().cumsum(0).view_as(returns) - 1, -1)
            index = _at_slots(returned_row, staged, -1)
        else:
            sums = x[: sum(send)]
            if handle.do_expand:
                sums = _sum_of_rows(x, rows, x.new_zeros((len(rows), x.shape[1]), dtype=torch.float32)).bfloat16()
            returned, *weights = self._exchange("combine", send, back, sums, *weights)
            index = torch.where(handle.dst_buffer_slot_idx >= 0, staged, -1)
        if request.previous_event_before_epilogue is not None:
            request.previous_event_before_epilogue.current_stream_wait()
        start = x.new_zeros((len(ranks), x.shape[1]), dtype=torch.float32)
        for bias in request.bias:
            start += bias
        combined_x = _sum_of_rows(returned, index, start).bfloat16()
        return CombineResult(combined_x, _at_slots(weights[0], staged, 0.0) if weights else None)

    def gathering(self, num_bytes: int) -> CollectiveGathering:
        """See `tk_ep.backend.Backend`."""
        return CollectiveGathering(self._place, num_bytes, self._limit)

    def pipes(self, sizes: SlotSizes) -> CollectivePipes:
        """See `tk_ep.backend.Backend`."""
        return CollectivePipes(self._place, sizes, self._limit)

    def store(self, storage: Storage) -> Storage:
        """See `tk_ep.backend.Backend`. Others read it through this rank alone."""
        return storage.copied_to(torch.empty_like(storage.rows))

    def fetch(self, storage: Storage, request: FetchRequest) -> tuple[Tensor, Tensor | None]:
        """See `tk_ep.backend.Backend`. A rank asks the others for rows."""
        num_ranks, num_rows = self._place.num_ranks, len(storage.rows)
        entries = request.indices.flatten().long()
        asked = ((entries >= 0) & (entries < num_ranks * num_rows)).nonzero()[:, 0]
        owners = entries[asked] // num_rows
        # Those of rank 0 first, as they are sent.
        asked = asked[owners.argsort(stable=True)]
        send = torch.bincount(owners, minlength=num_ranks)
        (recv,) = self._exchange("engram_fetch", [1] * num_ranks, [1] * num_ranks, send[:, None])
        send, recv = send.tolist(), recv[:, 0].tolist()
        (wanted,) = self._exchange("engram_fetch", send, recv, (entries[asked] % num_rows)[:, None])
        table = storage.rows.view(torch.uint8)
        (rows,) = self._exchange("engram_fetch", recv, send, table.index_select(0, wanted[:, 0]))
        out = table.new_zeros((len(entries), table.shape[1])).index_copy_(0, asked, rows)
        return request.joined(out.view(storage.rows.dtype)), fetched_factors(storage, request)

    def barrier(self, with_cpu_sync: bool) -> None:
        """See `tk_ep.backend.Backend`. The host waits in any case."""
        one = torch.ones(1, device=self._place.device)
        with waiting_for_peers("barrier", self._place.rank, self._limit):
            dist.all_reduce(one, group=self._place.group, async_op=True).wait(self._limit)
        if with_cpu_sync and one.is_cuda:
            torch.cuda.current_stream(one.device).synchronize()

    def check(self) -> None:
        """See `tk_ep.backend.Backend`. No call returns before it is over."""

    def release(self) -> None:
        """See `tk_ep.backend.Backend`. There is nothing to free."""


def exchange(place: Place, limit: timedelta, op: str, send: list[int], recv: list[int], *rows: Tensor) -> list[Tensor]:
    """Send the first send[0] rows of each tensor to rank 0 and so on; return what ranks sent, sum(recv) rows."""
    results = [each.new_empty((sum(recv), *each.shape[1:])) for each in rows]
    # Bytes, and nothing of rows without any.
    pairs = [
        (received.view(torch.uint8), sent.contiguous().view(torch.uint8))
        for received, sent in zip(results, rows)
        if sent.shape[1]
    ]
    with waiting_for_peers(op, place.rank, limit):
        options = {"group": place.group, "async_op": True}
        works = [dist.all_to_all_single(received, sent, recv, send, **options) for received, sent in pairs]
        for work in works:
            work.wait(limit)
    return results


def _recv_counts(handle: EPHandle) -> Tensor:
    """How many tokens came from each rank, int64 (R,)."""
    psum = handle.psum_num_recv_tokens_per_scaleup_rank.long()
    return psum.diff(prepend=psum.new_zeros(1))


def _at_slots(values: Tensor, rows: Tensor, none: float) -> Tensor:
    """values[rows[t, k], k] of values (n, K) and rows (T, K), or `none` where rows is -1."""
    out = values.new_full(rows.shape, none)
    token, slot = (rows >= 0).nonzero(as_tuple=True)
    out[token, slot] = values[rows[token, slot], slot]
    return out


def _sum_of_rows(x: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Add x[rows[t, 0]], x[rows[t, 1]] … to start[t], float32 (T, H), in this order. Rows of -1 are left out."""
    for slot in range(rows.shape[1]):
        token = (rows[:, slot] >= 0).nonzero()[:, 0]
        start.index_add_(0, token, x.index_select(0, rows[token, slot]).float())
    return start
