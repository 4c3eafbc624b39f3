"""The checks of all arguments, for every backend and the reference, and what they make of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_ep.events import EventHandle, EventOverlap
from tk_ep.handle import EPHandle, Place
from tk_ep.sizes import (
    MAX_EXPERTS,
    MAX_TOPK,
    combine_area_bytes,
    dispatch_area_bytes,
    dispatch_row_bytes,
    max_expanded_rows,
    max_recv_tokens,
)

_INT32_LIMIT = 2**31

Event = EventHandle | EventOverlap


class DispatchRequest(NamedTuple):
    """The checked arguments of a dispatch, with what a handle and defaults add."""

    place: Place
    x: Tensor
    """(T, …) contiguous rows of 16·n bytes"""
    sf: Tensor | None
    """(T, S) of 4-byte elements, any strides"""
    topk_idx: Tensor
    """(T, K): the handle's, if there is one"""
    topk_weights: Tensor | None
    stats: Tensor | None
    """int32 (L,), to which the real counts are added"""
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    num_sms: int
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool
    """Whether results have exactly as many rows as there are; without effect beside a handle, which has the sizes"""
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool
    previous_event_before_epilogue: Event | None = None
    """What receiving, but not sending, waits for"""

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.place.num_ranks

    @property
    def max_recv_tokens(self) -> int:
        """The most tokens that this rank receives."""
        return max_recv_tokens(self.place.num_ranks, self.num_max_tokens_per_rank)

    @property
    def max_expanded_rows(self) -> int:
        """The most rows of this rank's experts, if no token has an expert twice."""
        return max_expanded_rows(
            self.place.num_ranks,
            self.num_max_tokens_per_rank,
            self.topk_idx.shape[1],
            self.num_local_experts,
            self.expert_alignment,
        )

    @property
    def area_bytes(self) -> int:
        """Bytes of a buffer that this dispatch takes."""
        sf_bytes = 0 if self.sf is None else 4 * self.sf.shape[1]
        row_bytes = dispatch_row_bytes(self.x.shape[1] * self.x.element_size(), sf_bytes, self.topk_idx.shape[1])
        return dispatch_area_bytes(self.place.num_ranks, self.num_max_tokens_per_rank, row_bytes)

    def new_handle(self, topk_idx: Tensor, **results: Any) -> EPHandle:
        """The handle of this dispatch, with these fields beside those that the request gives."""
        names = ("place", "do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms")
        return EPHandle(topk_idx=topk_idx, **{name: getattr(self, name) for name in names}, **results)

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return {
            "num_experts": self.num_experts,
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "expert_alignment": self.expert_alignment,
            "columns of topk_idx": self.topk_idx.shape[1],
            "columns of x": self.x.shape[1],
            "bytes of an element of x": self.x.element_size(),
            "columns of scale factors": -1 if self.sf is None else self.sf.shape[1],
            "topk_weights given": int(self.topk_weights is not None),
            "handle given": int(self.handle is not None),
            "do_expand": int(self.do_expand),
        }


class DispatchResult(NamedTuple):
    """What a backend's dispatch returns: new tensors."""

    recv_x: Tensor
    recv_sf: Tensor | None
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    handle: EPHandle


class CombineRequest(NamedTuple):
    """The checked arguments of a combine."""

    x: Tensor
    """bfloat16, contiguous: (M, H) with an expanded handle, else (N, H)"""
    handle: EPHandle
    topk_weights: Tensor | None
    """float32: (M,) with an expanded handle, else (N, K)"""
    bias: tuple[Tensor, ...]
    """None, one or two, bfloat16 (T, H)"""
    num_sms: int
    sum_on_source: bool
    """Whether every row travels, and is summed at its source alone: expanded, without multiple reduction"""
    previous_event_before_epilogue: Event | None = None
    """What receiving, but not sending, waits for"""

    @property
    def area_bytes(self) -> int:
        """Bytes of a buffer that this combine takes."""
        num_topk = self.handle.topk_idx.shape[1]
        return combine_area_bytes(
            self.handle.place.num_ranks,
            self.handle.num_max_tokens_per_rank,
            self.x.shape[1],
            num_topk,
            not self.sum_on_source,
        )

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return {
            "num_experts of handle": self.handle.num_experts,
            "num_max_tokens_per_rank of handle": self.handle.num_max_tokens_per_rank,
            "do_expand of handle": int(self.handle.do_expand),
            "columns of topk_idx": self.handle.topk_idx.shape[1],
            "columns of x": self.x.shape[1],
            "topk_weights given": int(self.topk_weights is not None),
        }


class CombineResult(NamedTuple):
    """What a backend's combine returns: new tensors."""

    combined_x: Tensor
    combined_topk_weights: Tensor | None


def check_dispatch(
    place: Place,
    default_num_max_tokens_per_rank: int,
    *,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    cumulative_local_expert_recv_stats: Any,
    handle: Any,
    num_experts: Any = None,
    num_max_tokens_per_rank: Any = None,
    expert_alignment: Any = None,
    num_sms: Any = 0,
    do_handle_copy: Any = True,
    do_cpu_sync: Any = None,
    do_expand: Any = False,
    do_zero_padding: Any = False,
    use_tma_aligned_col_major_sf: Any = False,
) -> DispatchRequest:
    """The arguments of a rank's dispatch. Raises TypeError or ValueError, which name what is wrong."""
    check.flag("do_handle_copy", do_handle_copy)
    check.flag("do_expand", do_expand)
    check.flag("do_zero_padding", do_zero_padding)
    check.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    if do_cpu_sync is not None:
        check.flag("do_cpu_sync", do_cpu_sync)
    check.require(do_expand or not do_zero_padding, "do_zero_padding", "False without do_expand", do_zero_padding)
    check.in_range("num_sms", num_sms, 0, _INT32_LIMIT - 1)

    data, sf = _check_x(place, x)
    if handle is not None:
        _check_handle(place, handle)
        check.require(topk_idx is None, "topk_idx", "None beside handle", type(topk_idx).__name__)
        stats = cumulative_local_expert_recv_stats
        check.require(stats is None, "cumulative_local_expert_recv_stats", "None beside handle", type(stats).__name__)
        check.require(do_cpu_sync is not True, "do_cpu_sync", "None or False beside handle", do_cpu_sync)
        sizes = {
            "num_experts": num_experts,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "expert_alignment": expert_alignment,
        }
        for name, value in sizes.items():
            if value is not None:
                check.integer(name, value)
                check.require(value == getattr(handle, name), name, "{}, as in handle", value, getattr(handle, name))
        check.require(do_expand == handle.do_expand, "do_expand", "{}, as in handle", do_expand, handle.do_expand)
        topk_idx = handle.topk_idx
        num_experts, expert_alignment = handle.num_experts, handle.expert_alignment
        num_max_tokens_per_rank = handle.num_max_tokens_per_rank
        num_topk = topk_idx.shape[1]
        check.require(len(data) == len(topk_idx), "x", "{} rows, as in handle", len(data), len(topk_idx))
    else:
        check.require_type(num_experts is not None, "num_experts", "an int without handle", num_experts)
        check.in_range("num_experts", num_experts, 1, MAX_EXPERTS)
        check.multiple_of("num_experts", num_experts, place.num_ranks)
        if num_max_tokens_per_rank is None:
            num_max_tokens_per_rank = default_num_max_tokens_per_rank
        check.in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, 1, _INT32_LIMIT - 1)
        expert_alignment = 1 if expert_alignment is None else expert_alignment
        check.in_range("expert_alignment", expert_alignment, 1, _INT32_LIMIT - 1)
        check.require_type(topk_idx is not None, "topk_idx", "a tensor without handle", topk_idx)
        _, num_topk = check.tensor(
            "topk_idx", topk_idx, (torch.int64, torch.int32), (len(data), "num_topk"), device=place.device
        )
        check.require(1 <= num_topk <= MAX_TOPK, "topk_idx", "1 to {} slots a token", num_topk, MAX_TOPK)
        if check.reads_data(topk_idx):
            _check_experts_differ(topk_idx, num_experts)
        if cumulative_local_expert_recv_stats is not None:
            shape = (num_experts // place.num_ranks,)
            name = "cumulative_local_expert_recv_stats"
            check.tensor(name, cumulative_local_expert_recv_stats, (torch.int32,), shape, device=place.device)
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, (torch.float32,), (len(data), num_topk), device=place.device)
    check.require(
        len(data) <= num_max_tokens_per_rank,
        "x",
        "at most num_max_tokens_per_rank = {} rows",
        len(data),
        num_max_tokens_per_rank,
    )
    request = DispatchRequest(
        place,
        data,
        sf,
        topk_idx,
        topk_weights,
        cumulative_local_expert_recv_stats,
        num_experts,
        num_max_tokens_per_rank,
        expert_alignment,
        num_sms,
        handle,
        do_handle_copy,
        handle is None and do_cpu_sync is not False,
        do_expand,
        do_zero_padding,
        use_tma_aligned_col_major_sf,
    )
    # Indices of rows and source rank · K + slot are int32.
    most = max(request.max_recv_tokens, request.max_expanded_rows)
    check.require(most < _INT32_LIMIT, "num_max_tokens_per_rank", "fewer than 2**31 received rows", most)
    # A slot is sent as its rank among the source's pairs of its expert · num_experts + expert.
    most = num_max_tokens_per_rank * num_experts
    check.require(most < _INT32_LIMIT, "num_max_tokens_per_rank", "fewer than 2**31 tokens · num_experts", most)
    if request.do_cpu_sync and place.device.type == "cuda":
        check.require(not torch.cuda.is_current_stream_capturing(), "do_cpu_sync", "False within a CUDA graph", True)
    return request


def _check_x(place: Place, x: Any) -> tuple[Tensor, Tensor | None]:
    if not isinstance(x, tuple | list):
        check.tensor("x", x, (torch.bfloat16,), ("num_tokens", "hidden"), device=place.device)
        data, sf, name = x, None, "x"
    else:
        check.require(len(x) == 2, "x", "a tensor or a pair of data and scale factors", len(x))
        data, sf, name = x[0], x[1], "x[0]"
        dtypes = (torch.float8_e4m3fn, torch.int8)
        num_tokens, _ = check.tensor(name, data, dtypes, ("num_tokens", "hidden"), device=place.device)
        check_factors("x[1]", sf, num_tokens, place.device)
    row_bytes = data.shape[1] * data.element_size()
    check.require(row_bytes > 0 and row_bytes % 16 == 0, name, "rows of a positive multiple of 16 bytes", row_bytes)
    return data, sf


def check_factors(name: str, sf: Any, num_rows: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless sf is (num_rows, S) of 4-byte elements, with any strides."""
    check.plain(name, sf)
    check.require_type(sf.dtype.itemsize == 4 and not sf.dtype.is_complex, name, "a dtype of 4 bytes", sf.dtype)
    check.tensor(name, sf, (sf.dtype,), (num_rows, "num_factors"), layout="any", device=device)


def _check_handle(place: Place, handle: Any) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle: expected an EPHandle, got {type(handle).__name__}")
    check.require(handle.place.group is place.group, "handle", "one of this buffer's group", handle.place.group)
    check.require(handle.place.rank == place.rank, "handle", "one of rank {}", handle.place.rank, place.rank)


def _check_experts_differ(topk_idx: Tensor, num_experts: int) -> None:
    experts, _ = topk_idx.sort(dim=1)
    is_expert = (experts[:, 1:] >= 0) & (experts[:, 1:] < num_experts)
    twice = ((experts[:, 1:] == experts[:, :-1]) & is_expert).any(1).nonzero()
    if len(twice):
        token = int(twice[0])
        raise ValueError(f"topk_idx[{token}]: expected an expert once in a token, got {topk_idx[token].tolist()}")


def check_combine(
    place: Place, *, x: Any, handle: Any, topk_weights: Any, bias: Any, num_sms: Any, allow_multiple_reduction: bool
) -> CombineRequest:
    """The arguments of a rank's combine. Raises TypeError or ValueError, which name what is wrong."""
    _check_handle(place, handle)
    check.in_range("num_sms", num_sms, 0, _INT32_LIMIT - 1)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    _, hidden = check.tensor("x", x, (torch.bfloat16,), (num_rows, "hidden"), device=place.device)
    check.require(hidden > 0 and hidden % 64 == 0, "x", "a positive multiple of 64 channels", hidden)
    num_tokens, num_topk = handle.topk_idx.shape
    if topk_weights is not None:
        shape = (num_rows,) if handle.do_expand else (num_rows, num_topk)
        check.tensor("topk_weights", topk_weights, (torch.float32,), shape, device=place.device)
    biases = tuple(bias) if isinstance(bias, tuple | list) else () if bias is None else (bias,)
    check.require(len(biases) <= 2, "bias", "at most two tensors", len(biases))
    for index, each in enumerate(biases):
        name = f"bias[{index}]" if isinstance(bias, tuple | list) else "bias"
        check.tensor(name, each, (torch.bfloat16,), (num_tokens, hidden), device=place.device)
    sum_on_source = handle.do_expand and not allow_multiple_reduction
    return CombineRequest(x, handle, topk_weights, biases, num_sms or handle.num_sms, sum_on_source)


def check_stream_options(
    num_qps: Any,
    previous_event: Any,
    previous_event_before_epilogue: Any,
    async_with_compute_stream: Any,
    allocate_on_comm_stream: Any,
) -> None:
    """What dispatch and combine take alike. Raises TypeError or ValueError, which name what is wrong."""
    check.in_range("num_qps", num_qps, 0, _INT32_LIMIT - 1)
    check.flag("async_with_compute_stream", async_with_compute_stream)
    check.flag("allocate_on_comm_stream", allocate_on_comm_stream)
    events = {"previous_event": previous_event, "previous_event_before_epilogue": previous_event_before_epilogue}
    for name, event in events.items():
        is_event = event is None or isinstance(event, Event)
        check.require_type(is_event, name, "an EventHandle or an EventOverlap", event)
    # Memory from the current stream may still be in use there, after the event.
    alone = previous_event is not None and not allocate_on_comm_stream
    check.require(not alone, "allocate_on_comm_stream", "True beside previous_event", allocate_on_comm_stream)
