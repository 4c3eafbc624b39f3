"""ElasticBuffer: what users call. It checks arguments, cares for streams, and hands the rest to a backend."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tk_core import check, env
from tk_ep import engram, streams
from tk_ep.all_gather import GatherRequest, Sessions, SessionSizes, Shape, check_shapes, gathered_bytes
from tk_ep.backend import Backend
from tk_ep.check import CombineRequest, DispatchRequest, Event, check_combine, check_dispatch, check_stream_options
from tk_ep.collective import CollectiveBackend
from tk_ep.consensus import agree, host_id
from tk_ep.errors import EPTimeoutError, UnsupportedTopologyError
from tk_ep.events import EventHandle, EventOverlap
from tk_ep.handle import EPHandle, Place
from tk_ep.pipeline import Pipes, SlotSizes, check_message
from tk_ep.sizes import MAX_SLOTS, MAX_TOPK, BufferSpace, buffer_bytes, with_flags

P = ParamSpec("P")
T = TypeVar("T")
Request = TypeVar(
    "Request",
    DispatchRequest,
    CombineRequest,
    SessionSizes,
    GatherRequest,
    SlotSizes,
    engram.Storage,
    engram.FetchRequest,
)
Pair = tuple[Tensor, Tensor]
_BACKENDS = ("auto", "symmetric", "collective")


def _eager(method: Callable[P, T]) -> Callable[P, T]:
    """A method at which torch.compile breaks its graph.

    `torch.compiler.disable` as a decorator would import torch._dynamo for everybody, which takes seconds.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class ElasticBuffer:
    """Sends tokens to the ranks that have their experts, and brings back what the experts made of them.

    Names, arguments and results are those of DeepEP 2.1. R ranks are in the group; E experts, L = E / R on each rank:
    expert e is on rank e // L. A rank has T tokens (0 is legal, ranks may differ) with K ≤ 32 slots each; an expert
    index outside of 0 … E-1 is no expert. Making a buffer, `dispatch`, `combine`, `barrier` and `destroy` are
    collective: all ranks of the group call them in the same order.

    Args:
        group: the process group; this process is in it.
        num_bytes: the buffer's size, by default what `get_buffer_size_hint` says for the next four arguments and
            allow_multiple_reduction.
        num_max_tokens_per_rank: the most tokens of a rank, equal on all ranks; a dispatch may give another number.
        hidden: channels of a token.
        num_topk: slots of a token; 0 stands for 32.
        use_fp8_dispatch: whether only FP8 or FP4 is dispatched, so that rows need less memory.
        allow_multiple_reduction: whether combine sums, and rounds, a token's rows on each rank before they travel.
            Without, all rows of expanded handles travel, and a result does not depend on the number of ranks.
        prefer_overlap_with_compute: whether a call takes few SMs by default (24, not 48).
        num_cpu_timeout_secs: how long the host waits for peers.
        num_gpu_timeout_secs: how long a kernel waits for peers.
        backend: "symmetric" (one host, GPUs that reach each other's memory), "collective" (any group) or "auto".

    num_cpu_bytes, deterministic, allow_hybrid_mode, sl_idx, num_allocated_qps and explicitly_destroy are DeepEP's, and
    change nothing: results never depend on timing, and nothing is freed before `destroy` or the garbage collector.

    Raises, on all ranks if one has the fault: TypeError or ValueError for a bad argument, or one in which ranks differ;
    UnsupportedTopologyError if backend="symmetric" cannot serve this group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        backend: Literal["auto", "symmetric", "collective"] = "auto",
    ) -> None:
        place = _place(group)
        self.group = group
        self.rank_idx, self.num_ranks = place.rank, place.num_ranks
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, place.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, place.rank
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.hidden = hidden
        self.num_topk = num_topk
        self.use_fp8_dispatch = use_fp8_dispatch
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.sl_idx = sl_idx
        self.num_allocated_qps = num_allocated_qps
        self.num_cpu_timeout_secs = num_cpu_timeout_secs
        self.num_gpu_timeout_secs = num_gpu_timeout_secs
        self.explicitly_destroy = explicitly_destroy
        self._place = place
        self._failure: BaseException | None = None
        self._destroyed = False
        self._sessions: Sessions | None = None
        self._slots: tuple[SlotSizes, Pipes] | None = None
        self._storage: engram.Storage | None = None
        error, facts = None, {}
        self._limit = timedelta(seconds=300)
        try:
            self._check(num_cpu_bytes, backend)
            self._limit = timedelta(seconds=num_cpu_timeout_secs)
            sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            if num_bytes is None:
                check.require(hidden > 0, "hidden", "a positive number of channels without num_bytes", hidden)
                name = "num_max_tokens_per_rank"
                check.require(sizes[0] > 0, name, "a positive number without num_bytes", sizes[0])
                num_bytes = buffer_bytes(place.num_ranks, *sizes, allow_multiple_reduction)
            check.in_range("num_bytes", num_bytes, 1, 2**62)
            facts = {
                "num_bytes": num_bytes,
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "allow_multiple_reduction": int(allow_multiple_reduction),
                "backend": _BACKENDS.index(backend),
            }
        except (TypeError, ValueError) as found:
            error = found
        (hosts,) = agree(place, "ElasticBuffer", facts, error, self._limit, (host_id(),)).t().tolist()
        self.num_bytes: int = num_bytes
        self._hosts = hosts
        self._space = BufferSpace(num_bytes)
        self._backend = self._make_backend(backend)
        self.backend = self._backend.name
        """Which backend serves this buffer: "symmetric" or "collective"."""

    def _check(self, num_cpu_bytes: int, backend: str) -> None:
        for name in ("use_fp8_dispatch", "deterministic", "allow_hybrid_mode", "allow_multiple_reduction"):
            check.flag(name, getattr(self, name))
        check.flag("prefer_overlap_with_compute", self.prefer_overlap_with_compute)
        check.flag("explicitly_destroy", self.explicitly_destroy)
        check.in_range("num_cpu_bytes", num_cpu_bytes, 0, 2**62)
        for name in ("num_max_tokens_per_rank", "hidden", "sl_idx", "num_allocated_qps"):
            check.in_range(name, getattr(self, name), 0, 2**31 - 1)
        check.in_range("num_topk", self.num_topk, 0, MAX_TOPK)
        for name in ("num_cpu_timeout_secs", "num_gpu_timeout_secs"):
            check.number(name, getattr(self, name))
            check.require(getattr(self, name) > 0, name, "a positive number of seconds", getattr(self, name))
        check.one_of("backend", backend, _BACKENDS)

    def _make_backend(self, backend: str) -> Backend:
        """All ranks decide alike: by what they have gathered."""
        if backend == "collective":
            return CollectiveBackend(self._place, self._limit)
        from tk_ep.symmetric.backend import SymmetricBackend, find_obstacle

        obstacle = find_obstacle(self._place, self._hosts, self._limit)
        if obstacle is not None:
            if backend == "auto":
                return CollectiveBackend(self._place, self._limit)
            raise UnsupportedTopologyError(
                f"backend: 'symmetric' does not serve this group: {obstacle.reason}", obstacle.ranks
            )
        num_sms = self.get_theoretical_num_sms(0, 0)
        return SymmetricBackend(self._place, self.num_bytes, num_sms, self.num_gpu_timeout_secs, self._limit)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a buffer: R · T dispatched rows, min(R, K) · T combined ones (K · T without multiple reduction), to
        2 MiB.

        T is num_max_tokens_per_rank, and num_topk 0 stands for K = 32 slots. allow_hybrid_mode changes nothing.
        """
        check.in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, 1, 2**31 - 1)
        check.in_range("hidden", hidden, 1, 2**31 - 1)
        check.in_range("num_topk", num_topk, 0, MAX_TOPK)
        for name, value in (
            ("use_fp8_dispatch", use_fp8_dispatch),
            ("allow_hybrid_mode", allow_hybrid_mode),
            ("allow_multiple_reduction", allow_multiple_reduction),
        ):
            check.flag(name, value)
        num_ranks = _place(group).num_ranks
        return buffer_bytes(
            num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
        )

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: dist.ProcessGroup, shapes: Shape | Sequence[Shape], dtype: torch.dtype
    ) -> int:
        """Bytes of a session that gathers tensors of a shape, or of each of several, from all ranks of the group."""
        sizes = [prod(shape) * dtype.itemsize for shape in check_shapes(shapes, dtype)]
        return gathered_bytes(_place(group).num_ranks, sizes)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        """Bytes of a buffer for such sessions, one after the other: to 2 MiB."""
        _place(group)
        check.in_range("num_max_session_bytes", num_max_session_bytes, 1, 2**62)
        return with_flags(num_max_session_bytes)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes of a buffer with slots for so many tensors to each of two neighbours: to 2 MiB."""
        return with_flags(_slot_sizes(num_max_tensor_bytes, num_max_inflight_tensors).num_bytes)

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Bytes of a buffer on the GPU, to 2 MiB, and on the host, for a rank's num_entries rows of `hidden` elements.

        Nothing is kept on the host, and num_max_tokens_per_rank changes nothing: what is fetched is new.
        """
        for name, value in (("num_entries", num_entries), ("hidden", hidden)):
            check.in_range(name, value, 1, 2**31 - 1)
        check.in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, 2**31 - 1)
        check.require_type(isinstance(dtype, torch.dtype), "dtype", "a torch.dtype", dtype)
        return with_flags(num_entries * hidden * dtype.itemsize), 0

    @_eager
    def dispatch(
        self,
        x: Tensor | Pair,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor | Pair, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that has one of its experts.

        Args:
            x: bfloat16 (T, H), or a pair of data, float8_e4m3fn (T, H) or FP4 codes int8 (T, H / 2), and scale factors
                (T, S) of 4-byte elements with any strides. Rows are multiples of 16 bytes.
            topk_idx: int64 or int32 (T, K), global experts.
            topk_weights: float32 (T, K).
            cumulative_local_expert_recv_stats: int32 (L,), to which the number of (token, slot) pairs of each local
                expert is added.
            num_experts: E, a multiple of R up to 1024; by default the handle's.
            num_max_tokens_per_rank: the most tokens of a rank, equal on all; by default the handle's or the buffer's.
            expert_alignment: rows of an expert begin at a multiple of it; by default the handle's, or 1.
            num_sms: the most SMs that sending may take; 0: `get_theoretical_num_sms`.
            num_qps: changes nothing.
            previous_event: what the call waits for, instead of all work of the current stream. Needs
                allocate_on_comm_stream, as memory of the current stream may still be in use there.
            previous_event_before_epilogue: what receiving waits for.
            async_with_compute_stream: the current stream does not wait for the results; their event does.
            allocate_on_comm_stream: allow previous_event.
            handle: an earlier dispatch's, whose routing is used again: topk_idx is None, T and sizes are as then, no
                counts are exchanged, and rows are where they were. So it is the backward of combine.
            do_handle_copy: whether the handle has a copy of topk_idx, so that topk_idx may be overwritten.
            do_cpu_sync: whether the host waits for counts, and results have exact sizes. By default it does unless a
                handle has the sizes. Without, N = R · num_max_tokens_per_rank and M is the most that can be.
            do_expand: return a row for each (token, slot) of a local expert.
            do_zero_padding: with do_expand, zero the rows without a token inside segments.
            use_tma_aligned_col_major_sf: return scale factors with strides (1, rows to a multiple of 4), which grouped
                products read by TMA.

        Returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event), new tensors:
            Without do_expand N tokens, ordered by (source rank, token): recv_x like x; recv_topk_idx (N, K) of
            topk_idx's dtype, local experts, -1 for those elsewhere; recv_topk_weights (N, K), all of the token's.
            With do_expand M rows, experts in order, those of an expert ordered by (source rank, token, slot): recv_x;
            None; recv_topk_weights (M,), 0 in rows without a token.
            recv_topk_weights is None without topk_weights. Other rows without a token are unspecified.

        Raises TypeError or ValueError for a bad argument, before anything is sent; EPTimeoutError.
        """
        self._require_usable("dispatch", self._backend.supports_capture)

        def checked() -> DispatchRequest:
            check_stream_options(
                num_qps,
                previous_event,
                previous_event_before_epilogue,
                async_with_compute_stream,
                allocate_on_comm_stream,
            )
            request = check_dispatch(
                self._place,
                self.num_max_tokens_per_rank,
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
                num_experts=num_experts,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
                num_sms=num_sms,
                handle=handle,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=do_cpu_sync,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
            )
            self._space.claim(dispatch_bytes=request.area_bytes)
            return request._replace(previous_event_before_epilogue=previous_event_before_epilogue)

        request = self._agreed("dispatch", checked)
        result, event = self._run(
            "dispatch",
            lambda: self._backend.dispatch(request),
            tuple(request),
            previous_event,
            async_with_compute_stream,
        )
        recv_x = result.recv_x if result.recv_sf is None else (result.recv_x, result.recv_sf)
        return recv_x, result.recv_topk_idx, result.recv_topk_weights, result.handle, event

    @_eager
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Bring rows back to their tokens' ranks, and sum those of each token. Nothing is multiplied by weights.

        With s_r(t) the sum of token t's rows on rank r in ascending order of slots, rounded to bfloat16 (the row itself
        without do_expand), combined_x(t) is the bfloat16 of bias₀ + bias₁ + Σ s_r(t), ranks in ascending order of the
        token's last slot on them. With allow_multiple_reduction=False and do_expand, it is that of bias₀ + bias₁ + the
        sum of all rows, slots in ascending order. Sums are float32 and begin with +0. So it is dispatch's backward.

        Args:
            x: bfloat16 (M, H) with a handle that do_expand made, else (N, H). H is a multiple of 64.
            handle: of the dispatch.
            topk_weights: float32 (M,) or (N, K).
            bias: one or two of bfloat16 (T, H).
            num_sms: the most SMs that sending may take; 0: the handle's.
            num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
            allocate_on_comm_stream: as for `dispatch`.

        Returns (combined_x bfloat16 (T, H), combined_topk_weights float32 (T, K), event): each slot's weight is from
        the rank of its expert, 0 without one; None without topk_weights.

        Raises TypeError or ValueError for a bad argument, before anything is sent; EPTimeoutError.
        """
        self._require_usable("combine", self._backend.supports_capture)

        def checked() -> CombineRequest:
            check_stream_options(
                num_qps,
                previous_event,
                previous_event_before_epilogue,
                async_with_compute_stream,
                allocate_on_comm_stream,
            )
            request = check_combine(
                self._place,
                x=x,
                handle=handle,
                topk_weights=topk_weights,
                bias=bias,
                num_sms=num_sms,
                allow_multiple_reduction=self.allow_multiple_reduction,
            )
            self._space.claim(combine_bytes=request.area_bytes)
            return request._replace(previous_event_before_epilogue=previous_event_before_epilogue)

        request = self._agreed("combine", checked)
        result, event = self._run(
            "combine", lambda: self._backend.combine(request), tuple(request), previous_event, async_with_compute_stream
        )
        return result.combined_x, result.combined_topk_weights, event

    @_eager
    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Set what a session of `all_gather` may take: bytes, as `get_agrs_num_max_session_bytes` says, and calls.

        Collective; raises TypeError or ValueError on all ranks if one has a bad argument, RuntimeError in a session.
        """
        op = "agrs_set_config"
        self._require_usable(op)

        def checked() -> SessionSizes:
            check.in_range("num_max_session_bytes", num_max_session_bytes, 1, 2**62)
            check.in_range("num_max_all_gathers_per_session", num_max_all_gathers_per_session, 1, 2**31 - 1)
            self._require_session(op, False)
            self._space.serve("all_gather", num_max_session_bytes, f"a session takes {num_max_session_bytes}")
            return SessionSizes(num_max_session_bytes, num_max_all_gathers_per_session)

        sizes = self._agreed(op, checked, always=True)
        self._sessions = Sessions(self._place, sizes, self._backend.gathering(num_max_session_bytes))

    @_eager
    def create_agrs_session(self) -> None:
        """Begin a session: until its end, what `all_gather` returns is valid. Collective.

        A CUDA graph, where the backend supports them, has whole sessions.
        """
        self._require_usable("create_agrs_session", self._backend.supports_capture)
        self._require_session("create_agrs_session", False)
        if self._sessions is None:
            raise RuntimeError("create_agrs_session: expected agrs_set_config before")
        self._sessions.begin(self._is_capturing())

    @_eager
    def destroy_agrs_session(self) -> None:
        """End the session, whose results may be overwritten from now on. Collective. Raises EPTimeoutError."""
        self._require_usable("destroy_agrs_session", self._backend.supports_capture)
        sessions = self._require_session("destroy_agrs_session", True)
        self._run("destroy_agrs_session", sessions.end, (), None, False)

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session for the length of a with block; nothing unless `enabled`."""
        check.flag("enabled", enabled)
        if enabled:
            self.create_agrs_session()
        try:
            yield
        finally:
            if enabled:
                self.destroy_agrs_session()

    @_eager
    def agrs_get_inplace_tensor(
        self, shapes: Shape | Sequence[Shape], dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, ...]:
        """A tensor of a shape, or for several shapes a tuple, which `all_gather` gathers without copying it first.

        It is in the session's memory, and valid as long. Collective. Raises TypeError or ValueError.
        """
        self._require_usable("agrs_get_inplace_tensor", self._backend.supports_capture)
        sessions = self._require_session("agrs_get_inplace_tensor", True)
        several = check_shapes(shapes, dtype)
        tensors = sessions.new(several, dtype)
        return tuple(tensors) if several != [tuple(shapes)] else tensors[0]

    @_eager
    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Gather a tensor, or several, of equal shapes and dtypes on all ranks. Collective.

        Args:
            t: one or several contiguous tensors of any dtype and shape, which must not change before the wait.

        Returns (gathered, …, wait): for each tensor one of shape (R, …), ordered by rank, valid until the session ends;
        and a function that makes the current stream, or a CPU, wait until all of them have arrived.

        Raises TypeError or ValueError for a bad argument, before anything is sent; `wait` raises EPTimeoutError.
        """
        self._require_usable("all_gather", self._backend.supports_capture)
        sessions = self._require_session("all_gather", True)

        def checked() -> GatherRequest:
            tensors = t if isinstance(t, tuple | list) else (t,)
            for index, each in enumerate(tensors):
                name = "t" if each is t else f"t[{index}]"
                check.plain(name, each)
                check.tensor(name, each, (each.dtype,), (...,), device=self._place.device)
            return GatherRequest(list(tensors))

        request = self._agreed("all_gather", checked)
        places = sessions.places(request)
        (gathered, arrive), event = self._run(
            "all_gather", lambda: sessions.gather(request, places), (request.tensors,), None, True
        )

        def wait() -> None:
            event.current_stream_wait()
            self._guarded(arrive)

        return *gathered, wait

    @_eager
    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Make slots, at most 256, for tensors on their way to a neighbour: their largest size, and how many. Once.

        Collective; raises TypeError or ValueError on all ranks if one has a bad argument.
        """
        self._require_usable("pp_set_config")

        def checked() -> SlotSizes:
            if self._slots is not None:
                raise RuntimeError("pp_set_config: expected once for a buffer")
            sizes = _slot_sizes(num_max_tensor_bytes, num_max_inflight_tensors)
            self._space.serve("pp_send and pp_recv", sizes.num_bytes, f"slots take {sizes.num_bytes}")
            return sizes

        sizes = self._agreed("pp_set_config", checked, always=True)
        self._slots = sizes, self._guarded(lambda: self._backend.pipes(sizes))

    @_eager
    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a contiguous tensor to a neighbour in the ring of ranks, rank - 1 or rank + 1 modulo R.

        It is copied to a slot, so t may change; if num_max_inflight_tensors are on their way, the current stream, or a
        CPU, waits for the receiver. num_sms changes nothing.

        Raises TypeError or ValueError for a bad argument; EPTimeoutError.
        """
        pipes = self._checked_pipes("pp_send", "dst_rank_idx", dst_rank_idx, t, num_sms)
        self._run("pp_send", lambda: pipes.send(t, dst_rank_idx), (t,), None, False)

    @_eager
    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receive in t what a neighbour sends next, of the same number of bytes.

        t is contiguous. num_sms changes nothing. Raises TypeError or ValueError for a bad argument; EPTimeoutError.
        """
        pipes = self._checked_pipes("pp_recv", "src_rank_idx", src_rank_idx, t, num_sms)
        self._run("pp_recv", lambda: pipes.receive(t, src_rank_idx), (t,), None, False)

    @_eager
    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Store a rank's entries for `engram_fetch`, in place of those stored before. Arguments are copied.

        Args:
            storage: (n, H) of any dtype, contiguous, entries rank · n … rank · n + n - 1; n, H and the dtype's size are
                the same on all ranks, and rows are multiples of 16 bytes.
            sf: (R · n, S) of 4-byte elements, scale factors of the entries of all ranks, alike on all ranks.

        Collective; raises TypeError or ValueError on all ranks if one has a bad argument.
        """
        self._require_usable("engram_write")

        def checked() -> engram.Storage:
            new = engram.check_storage(self._place, storage, sf)
            self._space.serve("engram_fetch", new.rows.nbytes, f"entries take {new.rows.nbytes}")
            return new

        new = self._agreed("engram_write", checked, always=True)
        self._storage, _ = self._run("engram_write", lambda: self._backend.store(new), tuple(new), None, False)

    @_eager
    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begin to fetch entries of all ranks. Collective.

        Args:
            indices: int32 (T, m), which may differ between ranks, T too. Entry i is row i % n of rank i // n's storage;
                an index of no entry, which TK_DEBUG=1 refuses, gets zeros.
            num_qps: changes nothing.
            use_tma_aligned_col_major_sf: return scale factors with strides (1, T to a multiple of 4).

        Returns a function that makes the current stream wait, and returns the rows (T, m · H) of the storage's dtype,
        and their scale factors (T, m · S), or None.

        Raises TypeError or ValueError for a bad argument, before anything is sent; EPTimeoutError.
        """
        self._require_usable("engram_fetch", self._backend.supports_capture)
        if self._storage is None:
            raise RuntimeError("engram_fetch: expected engram_write before")
        storage = self._storage

        def checked() -> engram.FetchRequest:
            check.in_range("num_qps", num_qps, 0, 2**31 - 1)
            return engram.check_fetch(self._place, storage, indices, use_tma_aligned_col_major_sf)

        request = self._agreed("engram_fetch", checked)
        fetched, event = self._run(
            "engram_fetch",
            lambda: self._backend.fetch(storage, request),
            (indices, *storage),
            None,
            True,
        )

        def wait() -> tuple[Tensor, Tensor | None]:
            event.current_stream_wait()
            return fetched

        return wait

    @_eager
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks: later work of the current stream does, and with_cpu_sync the host, too.

        Without use_comm_stream the barrier itself is on the current stream. `sequential` changes nothing: ranks are
        never let through one after the other. Raises EPTimeoutError.
        """
        self._require_usable("barrier", self._backend.supports_capture)
        for name, value in (("use_comm_stream", use_comm_stream), ("with_cpu_sync", with_cpu_sync)):
            check.flag(name, value)
        check.flag("sequential", sequential)
        if use_comm_stream:
            self._run("barrier", lambda: self._backend.barrier(with_cpu_sync), (), None, False)
        else:
            self._guarded(lambda: self._backend.barrier(with_cpu_sync))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ElasticBuffer":
        """The buffer itself: a copy of a model sends through the same one."""
        return self

    def __copy__(self) -> "ElasticBuffer":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ElasticBuffer: cannot be pickled, as it belongs to this process's group; of a model save the state_dict"
        )

    def check(self) -> None:
        """Raise EPTimeoutError if a peer has been waited for past a limit. It waits for nothing."""
        self._raise_failure("check")
        if not self._destroyed:
            self._guarded(self._backend.check)

    def destroy(self) -> None:
        """Wait for all ranks, then release the buffer. It may be called again, which does nothing.

        A buffer that has failed is released at once. Raises EPTimeoutError, after releasing.
        """
        if self._destroyed:
            return
        try:
            self._raise_failure("destroy")
            self.barrier(with_cpu_sync=True)
        finally:
            self._destroyed = True
            self._sessions = self._slots = self._storage = None
            self._backend.release()

    def capture(self) -> EventHandle:
        """The work that the current stream has been given so far, for previous_event. On a CPU it is nothing."""
        self._require_usable("capture", self._backend.supports_capture)
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The stream of the buffer's work, one a device and process; None on a CPU."""
        return streams.get_comm_stream(self._place.device)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(hosts, ranks on a host, the most where hosts differ)."""
        return len(set(self._hosts)), max(map(self._hosts.count, self._hosts))

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): all ranks reach each other in one step."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """What num_sms=0 means: 24, or 48 without prefer_overlap_with_compute. The arguments change nothing."""
        return 24 if self.prefer_overlap_with_compute else 48

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: nothing goes through RDMA queues."""
        return 0

    def _raise_failure(self, op: str) -> None:
        failure = self._failure
        if isinstance(failure, EPTimeoutError):
            raise EPTimeoutError(failure.op, failure.rank, failure.reason) from failure
        if failure is not None:
            raise RuntimeError(f"{op}: the buffer cannot be used any more, as an earlier call failed") from failure

    def _require_usable(self, op: str, supports_capture: bool = False) -> None:
        if self._destroyed:
            raise RuntimeError(f"{op}: the buffer is destroyed")
        self._raise_failure(op)
        if not supports_capture and self._is_capturing():
            raise RuntimeError(f"{op}: it waits on the host, so CUDA graphs cannot capture it")

    def _is_capturing(self) -> bool:
        return self._place.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _require_session(self, op: str, is_open: bool) -> Sessions | None:
        """The sessions, if one is open or not as asked for. Raises RuntimeError."""
        if (self._sessions is not None and self._sessions.is_open) != is_open:
            raise RuntimeError(f"{op}: expected {'a' if is_open else 'no'} session, which create_agrs_session begins")
        # A replay would begin where the last one ended.
        if is_open and self._sessions.is_captured != self._is_capturing():
            raise RuntimeError(f"{op}: expected the session to begin and end in one CUDA graph, or outside of any")
        return self._sessions

    def _checked_pipes(self, op: str, name: str, rank: int, t: Tensor, num_sms: int) -> Pipes:
        self._require_usable(op, self._backend.supports_capture)
        if self._slots is None:
            raise RuntimeError(f"{op}: expected pp_set_config before")
        check.in_range("num_sms", num_sms, 0, 2**31 - 1)
        sizes, pipes = self._slots
        check_message(self._place, sizes, name, rank, t)
        return pipes

    def _agreed(self, op: str, checked: Callable[[], Request], always: bool = False) -> Request:
        """What the checks make of a call's arguments.

        With TK_DEBUG, or `always`, all ranks raise if one does, or if they differ.
        """
        if not always and not env.debug():
            return checked()
        request, error = None, None
        try:
            request = checked()
            for name, value in request._asdict().items() if env.debug() and torch.is_grad_enabled() else ():
                if any(each.requires_grad for each in streams.tensors_in(value)):
                    raise RuntimeError(f"{op}: drops the gradient of {name}; if none is wanted, detach the argument")
        except (TypeError, ValueError, RuntimeError) as found:
            error = found
        agree(self._place, op, {} if request is None else request.facts(), error, self._limit)
        return request

    def _guarded(self, call: Callable[[], T]) -> T:
        """Make a call; if it raises, the buffer has failed: its ranks no longer agree on what comes next."""
        try:
            return call()
        except BaseException as error:
            self._failure = error
            raise

    def _run(
        self,
        op: str,
        call: Callable[[], T],
        inputs: tuple[Any, ...],
        previous_event: Event | None,
        async_with_compute_stream: bool,
    ) -> tuple[T, EventOverlap]:
        with torch.no_grad():
            return self._guarded(
                lambda: streams.on_comm_stream(
                    self._place.device, call, inputs, previous_event, async_with_compute_stream, self.check
                )
            )


def _place(group: Any) -> Place:
    check.require_type(isinstance(group, dist.ProcessGroup), "group", "a torch.distributed.ProcessGroup", group)
    rank = dist.get_rank(group)
    check.require(rank >= 0, "group", "a group that this process is in", rank)
    device = torch.device("cpu")
    if "cuda:nccl" in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
    return Place(group, rank, dist.get_world_size(group), device)


def _slot_sizes(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> SlotSizes:
    check.in_range("num_max_tensor_bytes", num_max_tensor_bytes, 1, 2**62)
    check.in_range("num_max_inflight_tensors", num_max_inflight_tensors, 1, MAX_SLOTS)
    return SlotSizes(num_max_tensor_bytes, num_max_inflight_tensors)
