"""What one rank launches. A call is a few steps, so that the ranks of a LocalGroup can take each step in turn.

    dispatch    push (route, push_tokens) → count (wait_for_counts) → receive (receive_tokens, transpose_factors)
    combine     push (push_rows) → wait → sum (sum_rows)

A dispatch of many bytes is split: ranks tell counts before they send, so a rank copies its own tokens, on a stream of
its own, while others' are on their way, then waits for these and copies them, too. Ranks need not agree on it.

All kernels of a call are compiled and loaded before the first is launched: until then no peer waits for this rank.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.math import align
from tk_core.num_sms import get_num_sms
from tk_ep.check import CombineRequest, CombineResult, DispatchRequest, DispatchResult
from tk_ep.errors import EPTimeoutError
from tk_ep.events import EventHandle
from tk_ep.handle import Place
from tk_ep.sizes import FLAG_BYTES, MAX_EXPERTS
from tk_ep.symmetric import memory
from tk_ep.symmetric.combine import PushNumbers, SumNumbers, Sums, push_rows_kernel, sum_rows_kernel
from tk_ep.symmetric.exchange import GIVEN_UP, Step, exchange_kernel
from tk_ep.symmetric.fetch import fetch_kernel
from tk_ep.symmetric.fetch import num_blocks as num_fetch_blocks
from tk_ep.symmetric.kernels import Sizes, max_row_bytes, with_bulk_copies
from tk_ep.symmetric.push_tokens import Content, push_tokens_kernel
from tk_ep.symmetric.receive_tokens import Numbers as ReceiveNumbers
from tk_ep.symmetric.receive_tokens import Results, receive_tokens_kernel
from tk_ep.symmetric.route import Numbers as RouteNumbers
from tk_ep.symmetric.route import parts, route_kernel
from tk_ep.symmetric.transpose_factors import transpose_factors_kernel
from tk_ep.symmetric.wait import Numbers as CountNumbers
from tk_ep.symmetric.wait import wait_for_counts_kernel, wait_kernel

Launch = Callable[..., None]
_MAX_INT32 = 2**31 - 1
SPLIT_BYTES = 8 << 20
"""Dispatches of at least so many bytes of a rank are split: of fewer, the launches more cost what is gained."""
MAX_BYTES = memory.UNIT << 31
"""A buffer has to be smaller: kernels count its units in int32."""


class Dispatch(NamedTuple):
    """A dispatch under way."""

    request: DispatchRequest
    sizes: Sizes
    is_split: bool
    routed: EventHandle | None
    """Where a split call's own tokens can be copied, beside what follows; None if not beside it"""
    count: Launch
    receive: Launch
    transpose: Launch | None
    """What writes scale factors by columns, if they are asked for"""
    inputs: list[Tensor]
    """The rank's tokens, as kernels take them"""
    num_blocks: int
    """That send"""
    topk_idx: Tensor
    """For the handle"""
    dst_slots: Tensor
    """int32 (T or 1, K), also among the inputs: for the handle"""
    psum_per_rank: Tensor
    psum_per_expert: Tensor
    num_unaligned: Tensor
    first_rows: Tensor | None
    """int32 (R, L): where the rows of each source's pairs begin; None with a handle"""


class Received(NamedTuple):
    """What a dispatch writes: of each tensor a row at least."""

    num_tokens: int
    num_rows: int
    sizes_of_experts: list[int]
    metadata: Tensor
    x: Tensor
    sf: Tensor | None
    idx: Tensor | None
    weights: Tensor | None
    pos_to_expert: Tensor | None

    def arguments(self, first_rows: Tensor | None) -> list[Tensor]:
        """As receive_tokens takes them: see received.Outputs."""
        optional = [*_factors(self.sf, 0 if self.sf is None else self.sf.shape[1]), self.idx, *_words(self.weights)]
        optional += [first_rows, self.pos_to_expert]
        return [self.metadata, self.x.view(torch.int32), *(each for each in optional if each is not None)]


class Combine(NamedTuple):
    """A combine under way."""

    request: CombineRequest
    wait: Launch
    sum: Launch
    first_row: int


class Rank:
    """Launches a rank's kernels on the current stream.

    Args:
        place: of the rank.
        buffers: of each rank, int32 (units, 4), zero before the first call.
        num_bytes: what calls may take of a buffer.
        num_sms: thread blocks that send, where a call does not say.
        timeout_secs: how long a kernel waits for other ranks.
        beside: a stream for what can go on beside a call; None: it goes on in turn.
    """

    def __init__(
        self,
        place: Place,
        buffers: tuple[Tensor, ...],
        num_bytes: int,
        num_sms: int,
        timeout_secs: float,
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        self.place = place
        self._buffers = buffers
        self._own = buffers[place.rank]
        self._num_bytes = num_bytes
        self._num_sms = num_sms
        self._timeout_secs = timeout_secs
        self._beside_stream = beside
        pinned = partial(torch.zeros, dtype=torch.int32, pin_memory=place.device.type == "cuda")
        self._failure, self._counts = pinned(8), pinned(2 + MAX_EXPERTS)
        # See arguments.ranks: of kernels that never wait, and of those that do.
        self._ranks = self._own, place.rank, *buffers
        self._waiting = *self._ranks, int(timeout_secs * 1e9), self._failure.data_ptr()

    def push_tokens(self, request: DispatchRequest) -> Dispatch:
        """Send this rank's tokens to all ranks."""
        place, handle = request.place, request.handle
        device, num_ranks = place.device, place.num_ranks
        arch, num_topk = get_arch(device), request.topk_idx.shape[1]
        sizes = Sizes(num_ranks, request.num_experts, num_topk)
        x_bytes = request.x.shape[1] * request.x.element_size()
        num_factors = 0 if request.sf is None else request.sf.shape[1]
        content = Content(x_bytes, num_factors, request.topk_weights is not None)
        row_bytes = content.layout(num_topk).size * memory.UNIT
        check.require(row_bytes <= max_row_bytes(arch), "x", "rows of at most {} bytes", row_bytes, max_row_bytes(arch))
        idx_dtype = request.topk_idx.dtype
        results = Results(request.do_expand, request.do_zero_padding, handle is not None)
        push = push_tokens_kernel(sizes, content, None if handle is None else idx_dtype, arch)
        receive = receive_tokens_kernel(sizes, content, idx_dtype, results, arch)
        route = transpose = None
        if request.use_tma_aligned_col_major_sf and num_factors:
            transpose = transpose_factors_kernel(num_factors, arch)
        if handle is None:
            route = route_kernel(sizes, idx_dtype, request.do_handle_copy, arch)
            count = wait_for_counts_kernel(sizes, request.do_expand, request.stats is not None, arch)
        else:
            count = wait_kernel(num_ranks, memory.DISPATCH, arch)

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        num_tokens, most = len(request.x), request.num_max_tokens_per_rank
        topk_idx = request.topk_idx
        if handle is None:
            slots, dst_slots = new(max(num_tokens, 1), num_topk), new(max(num_tokens, 1), num_topk)
            num_blocks, groups_each = parts(num_tokens, num_topk, get_num_sms(device))
            numbers = RouteNumbers(
                num_tokens=num_tokens,
                first_dst_slot=place.rank * most,
                max_index=_MAX_INT32 // request.num_experts - 1,
                num_blocks=num_blocks,
                groups_each=groups_each,
            )
            copies = [torch.empty_like(_with_a_row(topk_idx))] if request.do_handle_copy else []
            route(_with_a_row(topk_idx), slots, dst_slots, *self._ranks, *numbers, *copies)
            topk_idx = copies[0][:num_tokens] if copies else topk_idx
            num_local = request.num_local_experts
            counts = new(num_ranks), new(num_local), new(num_local), new(num_ranks, num_local)
        else:
            slots, dst_slots = _with_a_row(handle.topk_idx), _with_a_row(handle.dst_buffer_slot_idx)
            psum_per_expert = handle.psum_num_recv_tokens_per_expert
            counts = handle.psum_num_recv_tokens_per_scaleup_rank, psum_per_expert, None, None
        inputs = [_aligned(request.x).view(torch.int32), slots, dst_slots]
        inputs += [*_factors(request.sf, num_factors), *_words(request.topk_weights)]
        is_split = request.x.nbytes >= SPLIT_BYTES
        routed = EventHandle() if is_split and self._beside_stream is not None else None
        num_blocks = min(request.num_sms or self._num_sms, get_num_sms(device))
        push(num_tokens, num_blocks, *self._waiting, *inputs)
        return Dispatch(
            request,
            sizes,
            is_split,
            routed,
            count,
            receive,
            transpose,
            inputs,
            num_blocks,
            topk_idx,
            dst_slots,
            *counts,
        )

    @contextmanager
    def _beside(self, call: Dispatch) -> Iterator[None]:
        """Launch beside what the call has launched since its tokens were routed, and before what it launches later.

        Tensors for it are made in it, or before tokens were routed: torch may fill new ones, on the current stream.
        """
        if call.routed is None:
            yield
            return
        try:
            with torch.cuda.stream(self._beside_stream):
                call.routed.current_stream_wait()
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._beside_stream)

    def count(self, call: Dispatch, limit: float) -> None:
        """Wait for all ranks' counts on the GPU, which a handle has, and for their tokens if the call is not split.

        If results have exact sizes the host waits, too, at most `limit` seconds. Raises EPTimeoutError.
        """
        if call.is_split and call.request.handle is not None:
            return
        with self._beside(call):
            self._await_others(call, with_rows=not call.is_split, with_host=call.request.do_cpu_sync)
            if call.request.do_cpu_sync:
                self.wait_on_host("dispatch", limit)

    def _await_others(self, call: Dispatch, with_rows: bool, with_host: bool) -> None:
        request = call.request
        if request.handle is not None:
            call.count(*self._waiting)
            return
        numbers = CountNumbers(
            num_max_tokens=request.num_max_tokens_per_rank,
            alignment=request.expert_alignment,
            num_rows=_MAX_INT32 if request.do_cpu_sync else request.max_expanded_rows,
            awaits_rows=int(with_rows),
        )
        counts = call.psum_per_rank, call.psum_per_expert, call.num_unaligned, call.first_rows
        host_counts = self._counts.data_ptr() if with_host else 0
        stats = () if request.stats is None else (request.stats,)
        call.count(*counts, host_counts, *self._waiting, *numbers, *stats)

    def wait_on_host(self, op: str, limit: float) -> None:
        """Wait on the host for all that was launched, at most `limit` seconds. Raises EPTimeoutError."""
        event = torch.cuda.Event()
        event.record()
        end = time.monotonic() + limit
        while not event.query():
            if time.monotonic() > end:
                raise EPTimeoutError(op, self.place.rank, f"waited {limit:g} s on the host for its GPU")
            time.sleep(0)
        self.check()

    def receive(self, call: Dispatch) -> DispatchResult:
        """Copy the rank's own tokens, and what has arrived, to new tensors."""
        request, handle = call.request, call.request.handle
        num_sms = get_num_sms(self.place.device)
        with self._beside(call):
            got = self._new_results(call)
            numbers = ReceiveNumbers(
                num_own_tokens=len(request.x),
                num_tokens=got.num_tokens,
                num_rows=got.num_rows,
                num_max_tokens=request.num_max_tokens_per_rank,
                alignment=request.expert_alignment,
                num_blocks=num_sms,
                takes_own=1,
                takes_others=1,
            )
            psums, tensors = (call.psum_per_rank, call.psum_per_expert), (*call.inputs, *got.arguments(call.first_rows))

            def take(numbers: ReceiveNumbers) -> None:
                call.receive(*psums, *self._ranks, *numbers, *tensors)

            if request.previous_event_before_epilogue is not None:
                request.previous_event_before_epilogue.current_stream_wait()
            if call.is_split:
                # On the SMs that sending leaves, if these are most.
                left = num_sms - call.num_blocks
                take(numbers._replace(takes_others=0, num_blocks=left if 2 * left >= num_sms else num_sms))
            else:
                take(numbers)
        if call.is_split:
            self._await_others(call, with_rows=True, with_host=False)
            take(numbers._replace(takes_own=0))
        rows, recv_sf, weights = got.num_rows if request.do_expand else got.num_tokens, got.sf, got.weights
        if call.transpose is not None:
            recv_sf = got.sf.new_empty_strided(got.sf.shape, (1, align(rows, 4)))
            counts = call.psum_per_expert if request.do_expand else call.psum_per_rank
            call.transpose(got.sf.view(torch.int32), recv_sf.view(torch.int32), counts, request.expert_alignment)
            if call.routed is not None and not torch.cuda.is_current_stream_capturing():
                got.sf.record_stream(torch.cuda.current_stream())
        if weights is not None:
            weights = weights[:rows, 0] if request.do_expand else weights[:rows]
        if handle is None:
            handle = request.new_handle(
                call.topk_idx,
                num_recv_tokens=got.num_tokens,
                num_expanded_tokens=got.num_rows,
                num_recv_tokens_per_expert_list=got.sizes_of_experts,
                psum_num_recv_tokens_per_scaleup_rank=call.psum_per_rank,
                psum_num_recv_tokens_per_expert=call.psum_per_expert,
                num_unaligned_recv_tokens_per_expert=call.num_unaligned,
                recv_src_metadata=got.metadata[: got.num_tokens],
                dst_buffer_slot_idx=call.dst_slots[: len(request.x)],
                pos_to_expert=None if got.pos_to_expert is None else got.pos_to_expert[: got.num_rows],
            )
        return DispatchResult(
            got.x[:rows],
            None if recv_sf is None else recv_sf[:rows],
            None if got.idx is None else got.idx[: got.num_tokens],
            weights,
            handle,
        )

    def _new_results(self, call: Dispatch) -> Received:
        request, handle = call.request, call.request.handle
        num_topk, sizes_of_experts = call.sizes.num_topk, []
        if handle is not None:
            num_tokens, num_rows = handle.num_recv_tokens, handle.num_expanded_tokens
        elif request.do_cpu_sync:
            num_tokens, num_rows, *sizes_of_experts = self._counts[: 2 + request.num_local_experts].tolist()
        else:
            num_tokens, num_rows = request.max_recv_tokens, request.max_expanded_rows
        rows = num_rows if request.do_expand else num_tokens

        def new(count: int, *columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((max(count, 1), *columns), dtype=dtype, device=self.place.device)

        idx = weights = pos_to_expert = None
        if not request.do_expand:
            idx = new(num_tokens, num_topk, dtype=request.topk_idx.dtype)
        elif handle is None:
            pos_to_expert = new(num_rows)
        if request.topk_weights is not None:
            weights = new(rows, 1 if request.do_expand else num_topk, dtype=torch.float32)
        return Received(
            num_tokens,
            num_rows,
            sizes_of_experts,
            new(num_tokens, 2 + num_topk) if handle is None else _with_a_row(handle.recv_src_metadata),
            new(rows, request.x.shape[1], dtype=request.x.dtype),
            None if request.sf is None else new(rows, request.sf.shape[1], dtype=request.sf.dtype),
            idx,
            weights,
            pos_to_expert,
        )

    def push_rows(self, request: CombineRequest) -> Combine:
        """Send rows back to their tokens' ranks."""
        x, handle = request.x, request.handle
        place, num_topk, hidden = self.place, handle.topk_idx.shape[1], x.shape[1]
        arch, sizes = get_arch(place.device), Sizes(place.num_ranks, handle.num_experts, num_topk)
        row = memory.sum_row(hidden, num_topk)
        row_bytes = row.size * memory.UNIT
        check.require(row_bytes <= max_row_bytes(arch), "x", "rows of at most {} bytes", row_bytes, max_row_bytes(arch))
        most = max(len(x), len(handle.topk_idx)) * row.values
        check.require(most <= _MAX_INT32, "x", "at most 2**31 - 1 vectors of 8 channels", most)
        sums = Sums(handle.do_expand, request.topk_weights is not None, request.sum_on_source)
        push = push_rows_kernel(sizes, hidden, sums, arch)
        wait = wait_kernel(place.num_ranks, memory.COMBINE, arch)
        total = sum_rows_kernel(
            sizes, hidden, sums._replace(do_expand=False), handle.topk_idx.dtype, len(request.bias), arch
        )
        first_row = memory.first_combined_row(self._num_bytes, request.area_bytes)
        numbers = PushNumbers(
            num_tokens=handle.num_recv_tokens,
            num_rows=handle.num_expanded_tokens,
            num_max_tokens=handle.num_max_tokens_per_rank,
            first_row=first_row,
            num_blocks=min(request.num_sms or self._num_sms, get_num_sms(place.device)),
        )
        weights = request.topk_weights
        if weights is not None:
            weights = _with_a_row(weights[:, None] if handle.do_expand else weights)
        inputs = _vectors(x), _with_a_row(handle.recv_src_metadata), handle.psum_num_recv_tokens_per_scaleup_rank
        push(*inputs, *self._waiting, *numbers, *_words(weights))
        return Combine(request, wait, total, first_row)

    def wait(self, call: Combine) -> None:
        """Wait for all ranks' rows, on the GPU."""
        call.wait(*self._waiting)

    def sum(self, call: Combine) -> CombineResult:
        """Sum what has come back."""
        request, handle = call.request, call.request.handle
        num_tokens, num_topk = handle.topk_idx.shape
        out = torch.empty((max(num_tokens, 1), request.x.shape[1]), dtype=torch.bfloat16, device=self.place.device)
        weights = None
        if request.topk_weights is not None:
            weights = torch.empty((max(num_tokens, 1), num_topk), dtype=torch.float32, device=self.place.device)
        routing = _with_a_row(handle.topk_idx), _with_a_row(handle.dst_buffer_slot_idx)
        numbers = SumNumbers(
            num_tokens=num_tokens,
            num_max_tokens=handle.num_max_tokens_per_rank,
            first_row=call.first_row,
            num_blocks=get_num_sms(self.place.device),
        )
        tensors = self._own.view(torch.bfloat16), *routing, _vectors(out)
        call.sum(*tensors, *self._ranks, *numbers, *map(_vectors, request.bias), *_words(weights))
        return CombineResult(out[:num_tokens], None if weights is None else weights[:num_tokens])

    def barrier(self) -> None:
        """Wait for all ranks to be here, on the GPU."""
        arch = with_bulk_copies(get_arch(self.place.device))
        wait_kernel(self.place.num_ranks, memory.BARRIER, arch)(*self._waiting)

    def data(self, rank: int) -> Tensor:
        """A rank's buffer behind the flags, uint8."""
        return self._buffers[rank].view(torch.uint8).flatten()[FLAG_BYTES : self._num_bytes]

    def words(self, rank: int) -> Tensor:
        """A rank's flags, int32."""
        return self._buffers[rank].view(-1)[: FLAG_BYTES // 4]

    def exchange(self) -> Callable[[Step], None]:
        """What makes steps of copies."""
        launch = exchange_kernel(self.place.num_ranks, with_bulk_copies(get_arch(self.place.device)))
        return lambda step: launch(*self._waiting, *step)

    def fetch(self, rows: Tensor, indices: Tensor) -> Tensor:
        """The entries of all ranks' rows, which are where this rank's are: (indices, H), zeros for no entry."""
        out = rows.new_empty((max(indices.numel(), 1), rows.shape[1]))
        units = out.view(torch.int32).view(-1, 4)
        row_units = rows[0].nbytes // memory.UNIT
        launch = fetch_kernel(self.place.num_ranks, row_units, with_bulk_copies(get_arch(self.place.device)))
        total = indices.numel() * row_units
        blocks = num_fetch_blocks(total, min(self._num_sms, get_num_sms(self.place.device)))
        launch(_with_a_row(indices.flatten()), units, total, len(rows), blocks, *self._buffers)
        return out[: indices.numel()]

    def check(self) -> None:
        """Raise EPTimeoutError if a kernel has met its limit. Waits for nothing."""
        failed, op, awaited, wanted, found = self._failure[:5].tolist()
        if failed:
            behind = wanted - found
            which = "has given up itself" if behind > GIVEN_UP // 2 else f"is {behind} calls behind"
            reason = f"waited {self._timeout_secs:g} s for rank {awaited}, which {which}"
            raise EPTimeoutError(memory.OPS[op], self.place.rank, reason)


def _with_a_row(x: Tensor) -> Tensor:
    """x, or a row to stand for it where it has none: kernels take no null pointers."""
    return x if len(x) else x.new_empty((1, *x.shape[1:]))


def _aligned(x: Tensor) -> Tensor:
    """x with a row at least, and at an address that bulk copies and wide loads take."""
    return _with_a_row(x) if x.data_ptr() % memory.UNIT == 0 else x.clone()


def _vectors(x: Tensor) -> Tensor:
    """bfloat16 rows as vectors of 8 channels."""
    return _aligned(x).view(-1, 8)


def _factors(sf: Tensor | None, num_factors: int) -> list[Tensor]:
    """The argument for scale factors, or none."""
    return [_with_a_row(sf).view(torch.int32)] if num_factors else []


def _words(weights: Tensor | None) -> list[Tensor]:
    """The argument for weights, or none."""
    return [] if weights is None else [_with_a_row(weights).view(torch.int32)]
