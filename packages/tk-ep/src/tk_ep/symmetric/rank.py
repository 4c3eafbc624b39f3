"""What one rank launches. A call is a few steps, so that the ranks of a LocalGroup can take each step in turn.

    dispatch    push (route, push_tokens) → count (wait_for_counts) → receive (receive_tokens, transpose_factors)
    combine     push (push_rows) → wait → sum (sum_rows)

All kernels of a call are compiled and loaded before the first is launched: until then no peer waits for this rank.
"""

import time
from collections.abc import Callable
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
MAX_BYTES = memory.UNIT << 31
"""A buffer has to be smaller: kernels count its units in int32."""


class Dispatch(NamedTuple):
    """A dispatch under way."""

    request: DispatchRequest
    sizes: Sizes
    count: Launch
    receive: Launch
    transpose: Launch | None
    """What writes scale factors by columns, if they are asked for"""
    topk_idx: Tensor
    """For the handle"""
    dst_slots: Tensor
    psum_per_rank: Tensor
    psum_per_expert: Tensor
    num_unaligned: Tensor
    first_rows: Tensor | None
    """int32 (R, L): where the rows of each source's pairs begin; None with a handle"""


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
    """

    def __init__(
        self, place: Place, buffers: tuple[Tensor, ...], num_bytes: int, num_sms: int, timeout_secs: float
    ) -> None:
        self.place = place
        self._buffers = buffers
        self._own = buffers[place.rank]
        self._num_bytes = num_bytes
        self._num_sms = num_sms
        self._timeout_secs = timeout_secs
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
        routing, topk_idx = [], request.topk_idx
        if handle is None:
            slots, dst_slots = new(max(num_tokens, 1), num_topk), new(max(num_tokens, 1), num_topk)
            routing = [new(request.num_experts + num_ranks)]
            num_blocks, groups_each = parts(num_tokens, num_topk, get_num_sms(device))
            numbers = RouteNumbers(
                num_tokens=num_tokens,
                first_dst_slot=place.rank * most,
                max_index=_MAX_INT32 // request.num_experts - 1,
                num_blocks=num_blocks,
                groups_each=groups_each,
            )
            copies = [torch.empty_like(_with_a_row(topk_idx))] if request.do_handle_copy else []
            route(_with_a_row(topk_idx), slots, dst_slots, *routing, *numbers, *copies)
            topk_idx = copies[0][:num_tokens] if copies else topk_idx
            num_local = request.num_local_experts
            counts = new(num_ranks), new(num_local), new(num_local), new(num_ranks, num_local)
        else:
            slots, dst_slots = _with_a_row(handle.topk_idx), _with_a_row(handle.dst_buffer_slot_idx)
            psum_per_expert = handle.psum_num_recv_tokens_per_expert
            counts = handle.psum_num_recv_tokens_per_scaleup_rank, psum_per_expert, None, None
        num_blocks = min(request.num_sms or self._num_sms, get_num_sms(device))
        optional = [*_factors(request.sf, num_factors), *_words(request.topk_weights), *routing]
        x = _aligned(request.x).view(torch.int32)
        push(x, slots, dst_slots, num_tokens, num_blocks, *self._waiting, *optional)
        return Dispatch(request, sizes, count, receive, transpose, topk_idx, dst_slots[:num_tokens], *counts)

    def count(self, call: Dispatch) -> None:
        """Wait for all ranks' tokens on the GPU, and count them unless a handle has the counts."""
        request = call.request
        if request.handle is not None:
            call.count(*self._waiting)
            return
        numbers = CountNumbers(
            num_max_tokens=request.num_max_tokens_per_rank,
            alignment=request.expert_alignment,
            num_rows=_MAX_INT32 if request.do_cpu_sync else request.max_expanded_rows,
        )
        counts = call.psum_per_rank, call.psum_per_expert, call.num_unaligned, call.first_rows
        host_counts = self._counts.data_ptr() if request.do_cpu_sync else 0
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
        """Copy what has arrived to new tensors."""
        request, handle = call.request, call.request.handle
        num_topk = call.sizes.num_topk
        sizes_of_experts = []
        if handle is not None:
            num_tokens, num_rows = handle.num_recv_tokens, handle.num_expanded_tokens
        elif request.do_cpu_sync:
            num_tokens, num_rows, *sizes_of_experts = self._counts[: 2 + request.num_local_experts].tolist()
        else:
            num_tokens, num_rows = request.max_recv_tokens, request.max_expanded_rows
        rows = num_rows if request.do_expand else num_tokens

        def new(count: int, *columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((max(count, 1), *columns), dtype=dtype, device=self.place.device)

        x = request.x
        recv_x = new(rows, x.shape[1], dtype=x.dtype)
        metadata = new(num_tokens, 2 + num_topk) if handle is None else _with_a_row(handle.recv_src_metadata)
        optional, recv_sf, recv_idx, weights, pos_to_expert = [], None, None, None, None
        if request.sf is not None:
            recv_sf = request.sf.new_empty((max(rows, 1), request.sf.shape[1]))
            optional += _factors(recv_sf, request.sf.shape[1])
        if not request.do_expand:
            recv_idx = new(num_tokens, num_topk, dtype=request.topk_idx.dtype)
            optional.append(recv_idx)
        if request.topk_weights is not None:
            weights = new(rows, 1 if request.do_expand else num_topk, dtype=torch.float32)
            optional += _words(weights)
        if handle is None:
            optional.append(call.first_rows)
            if request.do_expand:
                pos_to_expert = new(num_rows)
                optional.append(pos_to_expert)
        numbers = ReceiveNumbers(
            num_own_tokens=len(x),
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_max_tokens=request.num_max_tokens_per_rank,
            alignment=request.expert_alignment,
            num_blocks=get_num_sms(self.place.device),
        )
        inputs = _aligned(x).view(torch.int32), call.psum_per_rank, call.psum_per_expert
        call.receive(*inputs, *self._ranks, *numbers, metadata, recv_x.view(torch.int32), *optional)
        if call.transpose is not None:
            by_rows, num_factors = recv_sf.view(torch.int32), recv_sf.shape[1]
            recv_sf = recv_sf.new_empty_strided((len(recv_sf), num_factors), (1, align(rows, 4)))
            counts = call.psum_per_expert if request.do_expand else call.psum_per_rank
            call.transpose(by_rows, recv_sf.view(torch.int32), counts, request.expert_alignment)
        if weights is not None:
            weights = weights[:rows, 0] if request.do_expand else weights[:rows]
        if handle is None:
            handle = request.new_handle(
                call.topk_idx,
                num_recv_tokens=num_tokens,
                num_expanded_tokens=num_rows,
                num_recv_tokens_per_expert_list=sizes_of_experts,
                psum_num_recv_tokens_per_scaleup_rank=call.psum_per_rank,
                psum_num_recv_tokens_per_expert=call.psum_per_expert,
                num_unaligned_recv_tokens_per_expert=call.num_unaligned,
                recv_src_metadata=metadata[:num_tokens],
                dst_buffer_slot_idx=call.dst_slots,
                pos_to_expert=None if pos_to_expert is None else pos_to_expert[:num_rows],
            )
        return DispatchResult(
            recv_x[:rows],
            None if recv_sf is None else recv_sf[:rows],
            None if recv_idx is None else recv_idx[:num_tokens],
            weights,
            handle,
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
