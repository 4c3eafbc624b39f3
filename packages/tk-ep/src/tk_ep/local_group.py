"""LocalGroup: dispatch and combine of virtual ranks on one device, by the symmetric backend's kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_ep.all_ranks import Combined, Dispatched, Pair, combine_requests, combined, dispatch_requests, dispatched
from tk_ep.handle import EPHandle, Place
from tk_ep.reference.combine import combine_results
from tk_ep.reference.dispatch import dispatch_results
from tk_ep.sizes import MAX_RANKS, MAX_TOPK, BufferSpace, buffer_bytes

_NUM_SMS = 24
_TIMEOUT_SECS = 100.0


class LocalGroup:
    """Virtual ranks on one device: what several GPUs do, on one of them or on none.

    Calls are those of `tk_ep.reference`: lists with an item for each rank. On a GPU they run the symmetric backend's
    kernels, each rank's in turn, on the current stream. On a CPU they are the reference.

    Args:
        num_ranks: R, 1 to 8.
        device: where all tensors are.
        num_bytes, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction: as of
            `ElasticBuffer`. On a GPU, each rank has a buffer of num_bytes.

    Raises TypeError or ValueError for a bad argument; calls raise UnsupportedArchError on a GPU before sm_90.
    """

    def __init__(
        self,
        num_ranks: int,
        device: torch.device | str,
        *,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_multiple_reduction: bool = True,
    ) -> None:
        check.in_range("num_ranks", num_ranks, 1, MAX_RANKS)
        least = 1 if num_bytes is None else 0
        check.in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, least, 2**31 - 1)
        check.in_range("hidden", hidden, least, 2**31 - 1)
        check.in_range("num_topk", num_topk, 0, MAX_TOPK)
        check.flag("use_fp8_dispatch", use_fp8_dispatch)
        check.flag("allow_multiple_reduction", allow_multiple_reduction)
        if num_bytes is None:
            sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            num_bytes = buffer_bytes(num_ranks, *sizes, allow_multiple_reduction)
        check.in_range("num_bytes", num_bytes, 1, 2**62)
        self.num_ranks = num_ranks
        self.device = torch.empty(0, device=device).device
        self.num_bytes: int = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.allow_multiple_reduction = allow_multiple_reduction
        self._space = BufferSpace(num_bytes)
        self._places = [Place(self, rank, num_ranks, self.device) for rank in range(num_ranks)]
        self._ranks = []
        if self.device.type != "cpu":
            from tk_ep.symmetric.memory import allocated_units
            from tk_ep.symmetric.rank import Rank

            units = allocated_units(num_bytes)
            buffers = tuple(torch.zeros((units, 4), dtype=torch.int32, device=self.device) for _ in self._places)
            self._ranks = [Rank(place, buffers, num_bytes, _NUM_SMS, _TIMEOUT_SECS) for place in self._places]

    @torch.no_grad()
    def dispatch(
        self,
        x: Sequence[Tensor | Pair],
        topk_idx: Sequence[Tensor] | None = None,
        topk_weights: Sequence[Tensor] | None = None,
        cumulative_local_expert_recv_stats: Sequence[Tensor] | None = None,
        *,
        handle: Sequence[EPHandle] | None = None,
        **options: Any,
    ) -> Dispatched:
        """`tk_ep.reference.dispatch`; `options` are its arguments from num_experts on."""
        lists = {
            "x": x,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats,
            "handle": handle,
        }
        requests = dispatch_requests(self._places, self.num_max_tokens_per_rank, lists, options)
        self._space.claim(dispatch_bytes=requests[0].area_bytes)
        if not self._ranks:
            return dispatched(dispatch_results(requests))
        # No rank waits before all have sent.
        calls = [rank.push_tokens(request) for rank, request in zip(self._ranks, requests)]
        for rank, call in zip(self._ranks, calls):
            rank.count(call, _TIMEOUT_SECS)
        return dispatched([rank.receive(call) for rank, call in zip(self._ranks, calls)])

    @torch.no_grad()
    def combine(
        self,
        x: Sequence[Tensor],
        handle: Sequence[EPHandle],
        topk_weights: Sequence[Tensor] | None = None,
        bias: Sequence[Tensor | Sequence[Tensor] | None] | None = None,
        num_sms: int = 0,
    ) -> Combined:
        """`tk_ep.reference.combine`."""
        lists = {"x": x, "handle": handle, "topk_weights": topk_weights, "bias": bias}
        requests = combine_requests(self._places, lists, num_sms, self.allow_multiple_reduction)
        self._space.claim(combine_bytes=requests[0].area_bytes)
        if not self._ranks:
            return combined(combine_results(requests))
        calls = [rank.push_rows(request) for rank, request in zip(self._ranks, requests)]
        for rank, call in zip(self._ranks, calls):
            rank.wait(call)
        return combined([rank.sum(call) for rank, call in zip(self._ranks, calls)])
