"""Bad arguments, handles and events, on a buffer of one rank."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tk_core.testing import assert_equal
from tk_ep import ElasticBuffer, EPHandle, EPTimeoutError, EventHandle, EventOverlap, UnsupportedTopologyError

X = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
IDX = torch.tensor([[0, 1], [3, -1], [2, 0], [-1, -1], [1, 2]])
SF = torch.ones(5, 2)
WEIGHTS = torch.rand(5, 2)
ROWS = torch.zeros(7, 64).bfloat16()


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def buffer(group: dist.ProcessGroup) -> ElasticBuffer:
    return ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64)


def dispatch(buffer: ElasticBuffer, **changes: Any) -> tuple:
    return buffer.dispatch(**({"x": X, "topk_idx": IDX, "topk_weights": WEIGHTS, "num_experts": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"x": X.float()}, TypeError, "x: expected dtype torch.bfloat16, got torch.float32"),
        ({"x": X[:, ::2]}, ValueError, "x: expected contiguous"),
        ({"x": X[:, :4].contiguous()}, ValueError, "x: expected rows of a positive multiple of 16 bytes, got 8"),
        ({"x": X[:4]}, ValueError, r"topk_idx: expected shape \(4, num_topk\)"),
        (
            {"x": X.repeat(2, 1)[:9], "topk_idx": IDX.repeat(2, 1)[:9], "topk_weights": None},
            ValueError,
            "at most .* = 8",
        ),
        ({"x": (X, SF)}, TypeError, r"x\[0\]: expected dtype torch.float8_e4m3fn or torch.int8"),
        ({"x": (X.to(torch.float8_e4m3fn), SF.half())}, TypeError, r"x\[1\]: expected a dtype of 4 bytes"),
        ({"x": (X.to(torch.float8_e4m3fn), SF[:3])}, ValueError, r"x\[1\]: expected shape \(5, num_factors\)"),
        ({"x": (X, SF, SF)}, ValueError, "x: expected a tensor or a pair"),
        ({"x": None}, TypeError, "x: expected a torch.Tensor"),
        ({"x": X.to("meta")}, ValueError, "x: expected device cpu, got meta"),
        ({"topk_idx": None}, TypeError, "topk_idx: expected a tensor without handle"),
        ({"topk_idx": IDX.short()}, TypeError, "topk_idx: expected dtype torch.int64 or torch.int32"),
        ({"topk_idx": IDX[:, :0], "topk_weights": None}, ValueError, "topk_idx: expected 1 to 32 slots a token, got 0"),
        ({"topk_idx": IDX.repeat(1, 17), "topk_weights": None}, ValueError, "topk_idx: expected 1 to 32 .* got 34"),
        ({"topk_weights": WEIGHTS.double()}, TypeError, "topk_weights: expected dtype torch.float32"),
        ({"topk_weights": WEIGHTS[:, :1]}, ValueError, r"topk_weights: expected shape \(5, 2\)"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(4)}, TypeError, "cumulative_local_expert_recv_stats: "),
        ({"num_experts": None}, TypeError, "num_experts: expected an int without handle"),
        ({"num_experts": 1025}, ValueError, "num_experts: expected 1 to 1024, got 1025"),
        ({"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank: expected 1 to"),
        ({"num_max_tokens_per_rank": 4}, ValueError, "x: expected at most num_max_tokens_per_rank = 4 rows, got 5"),
        (
            {"num_max_tokens_per_rank": 2**30},
            ValueError,
            r"num_max_tokens_per_rank: expected fewer than 2\*\*31 .* rows",
        ),
        (
            {"num_max_tokens_per_rank": 2**14},
            ValueError,
            "num_bytes: expected a buffer of 4259840 bytes .* got 2097152",
        ),
        ({"expert_alignment": 0}, ValueError, "expert_alignment: expected 1 to"),
        ({"num_sms": -1}, ValueError, "num_sms: expected 0 to"),
        ({"num_qps": 1.5}, TypeError, "num_qps: expected an int"),
        ({"do_zero_padding": True}, ValueError, "do_zero_padding: expected False without do_expand"),
        ({"do_expand": 1}, TypeError, "do_expand: expected a bool"),
        ({"do_cpu_sync": 0}, TypeError, "do_cpu_sync: expected a bool"),
        ({"do_handle_copy": None}, TypeError, "do_handle_copy: expected a bool"),
        ({"use_tma_aligned_col_major_sf": "yes"}, TypeError, "use_tma_aligned_col_major_sf: expected a bool"),
        ({"async_with_compute_stream": 2}, TypeError, "async_with_compute_stream: expected a bool"),
        ({"previous_event": EventHandle()}, ValueError, "allocate_on_comm_stream: expected True beside previous_event"),
        ({"previous_event": 3, "allocate_on_comm_stream": True}, TypeError, "previous_event: expected an EventHandle"),
        ({"previous_event_before_epilogue": 3}, TypeError, "previous_event_before_epilogue: expected an EventHandle"),
    ],
)
def test_bad_dispatch(buffer: ElasticBuffer, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    stats = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(kind, match=match):
        dispatch(buffer, **({"cumulative_local_expert_recv_stats": stats} | changes))
    assert not stats.any()
    assert dispatch(buffer)[0].shape == (4, 64)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"handle": 3}, TypeError, "handle: expected an EPHandle, got int"),
        ({"topk_idx": IDX}, ValueError, "topk_idx: expected None beside handle"),
        ({"cumulative_local_expert_recv_stats": IDX}, ValueError, "cumulative_local_expert_recv_stats: expected None"),
        ({"x": X[:4]}, ValueError, "x: expected 5 rows, as in handle, got 4"),
        ({"num_experts": 8}, ValueError, "num_experts: expected 4, as in handle, got 8"),
        ({"num_max_tokens_per_rank": 7}, ValueError, "num_max_tokens_per_rank: expected 8, as in handle, got 7"),
        ({"expert_alignment": 2}, ValueError, "expert_alignment: expected 1, as in handle, got 2"),
        ({"do_expand": True}, ValueError, "do_expand: expected False, as in handle, got True"),
        ({"do_cpu_sync": True}, ValueError, "do_cpu_sync: expected None or False beside handle"),
        ({"topk_weights": WEIGHTS[:, :1]}, ValueError, r"topk_weights: expected shape \(5, 2\)"),
    ],
)
def test_bad_dispatch_with_a_handle(
    buffer: ElasticBuffer, changes: dict[str, Any], kind: type[Exception], match: str
) -> None:
    handle = dispatch(buffer)[3]
    with pytest.raises(kind, match=match):
        buffer.dispatch(**({"x": X, "handle": handle} | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"x": ROWS[:6]}, ValueError, r"x: expected shape \(7, hidden\)"),
        ({"x": ROWS.float()}, TypeError, "x: expected dtype torch.bfloat16"),
        ({"x": ROWS[:, :32].contiguous()}, ValueError, "x: expected a positive multiple of 64 channels, got 32"),
        ({"x": ROWS.repeat(1, 128)}, ValueError, "num_bytes: expected a buffer of 2211840 bytes"),
        ({"handle": None}, TypeError, "handle: expected an EPHandle, got NoneType"),
        ({"topk_weights": WEIGHTS}, ValueError, r"topk_weights: expected shape \(7\)"),
        ({"bias": X[:4]}, ValueError, r"bias: expected shape \(5, 64\)"),
        ({"bias": (X, X.float())}, TypeError, r"bias\[1\]: expected dtype torch.bfloat16"),
        ({"bias": (X, X, X)}, ValueError, "bias: expected at most two tensors, got 3"),
        ({"num_sms": None}, TypeError, "num_sms: expected an int"),
        ({"previous_event": EventHandle()}, ValueError, "allocate_on_comm_stream: expected True beside previous_event"),
    ],
)
def test_bad_combine(group: dist.ProcessGroup, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    buffer = ElasticBuffer(group, num_bytes=2 << 20, num_max_tokens_per_rank=128)
    handle = dispatch(buffer, do_expand=True)[3]
    with pytest.raises(kind, match=match):
        buffer.combine(**({"x": ROWS, "handle": handle} | changes))
    assert buffer.combine(ROWS, handle)[0].shape == (5, 64)


def test_a_handle_of_another_group(buffer: ElasticBuffer) -> None:
    handle = ElasticBuffer(dist.new_group([0]), num_max_tokens_per_rank=8, hidden=64).dispatch(X, IDX, num_experts=4)[3]
    with pytest.raises(ValueError, match="handle: expected one of this buffer's group"):
        buffer.dispatch(X, handle=handle)
    with pytest.raises(ValueError, match="handle: expected one of this buffer's group"):
        buffer.combine(X[:4], handle)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"num_bytes": 0}, ValueError, "num_bytes: expected 1 to"),
        (
            {"num_max_tokens_per_rank": 0},
            ValueError,
            "num_max_tokens_per_rank: expected a positive number without num_b",
        ),
        ({"num_max_tokens_per_rank": None}, TypeError, "num_max_tokens_per_rank: expected an int"),
        ({"num_cpu_bytes": -1}, ValueError, "num_cpu_bytes: expected 0 to"),
        ({"sl_idx": "3"}, TypeError, "sl_idx: expected an int"),
        ({"deterministic": 0}, TypeError, "deterministic: expected a bool"),
        ({"explicitly_destroy": 0}, TypeError, "explicitly_destroy: expected a bool"),
        ({"num_cpu_timeout_secs": 0}, ValueError, "num_cpu_timeout_secs: expected a positive number of seconds"),
        ({"num_gpu_timeout_secs": "1"}, TypeError, "num_gpu_timeout_secs: expected a number"),
        ({"backend": "nccl"}, ValueError, "backend: expected one of 'auto', 'symmetric', 'collective', got 'nccl'"),
    ],
)
def test_bad_buffer(group: dist.ProcessGroup, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        ElasticBuffer(group, **({"num_max_tokens_per_rank": 8, "hidden": 64} | changes))


T = torch.zeros(8)
INT32 = torch.zeros((2, 3), dtype=torch.int32)


@pytest.mark.parametrize(
    ("method", "args", "kind", "match"),
    [
        ("agrs_set_config", (0, 1), ValueError, "num_max_session_bytes: expected 1 to"),
        (
            "agrs_set_config",
            (2 << 20, 1),
            ValueError,
            r"num_bytes: expected a buffer of 2162688 bytes \(a session takes",
        ),
        ("agrs_get_inplace_tensor", ((2, -1), torch.int8), ValueError, r"shapes\[0\]: expected 0 to"),
        ("agrs_get_inplace_tensor", (8, torch.int8), TypeError, "shapes: expected a shape or a sequence of shapes"),
        ("agrs_get_inplace_tensor", ([(2,), 3], torch.int8), TypeError, r"shapes\[1\]: expected a shape"),
        ("agrs_get_inplace_tensor", ((2,), "int8"), TypeError, "dtype: expected a torch.dtype"),
        ("agrs_get_inplace_tensor", ((129,), torch.int8), ValueError, "num_max_session_bytes: expected at least 256"),
        ("all_gather", (T.to("meta"),), ValueError, "t: expected device cpu"),
        ("all_gather", ((T, 3),), TypeError, r"t\[1\]: expected a torch.Tensor"),
        ("all_gather", (T[::2],), ValueError, "t: expected contiguous"),
        ("all_gather", ((T, T),), ValueError, "num_max_session_bytes: expected at least 256, got 128"),
        ("pp_set_config", (64, 0), ValueError, "num_max_inflight_tensors: expected 1 to 256, got 0"),
        ("pp_set_config", (64, 257), ValueError, "num_max_inflight_tensors: expected 1 to 256, got 257"),
        ("pp_set_config", (2 << 20, 1), ValueError, r"num_bytes: expected .* \(slots take 4194304"),
        ("pp_send", (T, 0), ValueError, r"dst_rank_idx: expected a neighbour in the ring of ranks, of \[\], got 0"),
        ("pp_recv", (T, True), TypeError, "src_rank_idx: expected an int"),
        ("engram_write", (3,), TypeError, "storage: expected a torch.Tensor"),
        ("engram_write", (T,), ValueError, r"storage: expected shape \(num_entries, hidden\)"),
        ("engram_write", (INT32[:0],), ValueError, "storage: expected an entry at least"),
        ("engram_write", (X, X), TypeError, "sf: expected a dtype of 4 bytes"),
        ("engram_fetch", (INT32.long(),), TypeError, "indices: expected dtype torch.int32"),
        ("engram_fetch", (INT32, -1), ValueError, "num_qps: expected 0 to"),
        ("engram_fetch", (INT32, 0, 1), TypeError, "use_tma_aligned_col_major_sf: expected a bool"),
    ],
)
def test_bad_copies(group: dist.ProcessGroup, method: str, args: tuple, kind: type[Exception], match: str) -> None:
    """Calls that move tensors without routing; each is refused, and a good one of its kind works afterwards."""
    buffer = ElasticBuffer(group, num_bytes=2 << 20)
    if "set_config" not in method and method.startswith(("agrs", "all")):
        buffer.agrs_set_config(128, 1)
        buffer.create_agrs_session()
    elif method in ("pp_send", "pp_recv"):
        buffer.pp_set_config(64, 1)
    elif method == "engram_fetch":
        buffer.engram_write(X)
    with pytest.raises(kind, match=match):
        getattr(buffer, method)(*args)
    if method == "all_gather":
        gathered, wait = buffer.all_gather(T)
        wait()
        assert_equal(gathered, T[None])
    elif method == "engram_fetch":
        assert_equal(buffer.engram_fetch(INT32)()[0], X[:1].repeat(2, 3))


def test_copies_out_of_order(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, sending, fetching = (ElasticBuffer(group, num_bytes=2 << 20) for _ in range(3))
    for call, match in (
        (buffer.create_agrs_session, "create_agrs_session: expected agrs_set_config before"),
        (buffer.destroy_agrs_session, "destroy_agrs_session: expected a session"),
        (lambda: buffer.all_gather(T), "all_gather: expected a session"),
        (lambda: sending.pp_send(T, 1), "pp_send: expected pp_set_config before"),
        (lambda: fetching.engram_fetch(INT32), "engram_fetch: expected engram_write before"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    buffer.agrs_set_config(128, 1)
    sending.pp_set_config(64, 1)
    fetching.engram_write(X)
    buffer.create_agrs_session()
    for call, match in (
        (buffer.create_agrs_session, "create_agrs_session: expected no session"),
        (lambda: buffer.agrs_set_config(128, 1), "agrs_set_config: expected no session"),
        (lambda: sending.pp_set_config(64, 1), "pp_set_config: expected once"),
        (lambda: fetching.agrs_set_config(128, 1), "all_gather: this buffer serves engram_fetch"),
        (lambda: dispatch(sending, num_max_tokens_per_rank=8), "dispatch and combine: this buffer serves pp_send and"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    monkeypatch.setattr("tk_core.env.debug", lambda: True)
    with pytest.raises(ValueError, match="indices: expected entries below 5, got 5"):
        fetching.engram_fetch(INT32 + 5)
    with pytest.raises(ValueError, match="indices: expected no negative entries, got -1"):
        fetching.engram_fetch(INT32 - 1)


def test_copies_of_a_model_share_its_buffer(buffer: ElasticBuffer) -> None:
    for copy_it in (copy.copy, copy.deepcopy):
        assert copy_it(buffer) is buffer
    with pytest.raises(TypeError, match=r"ElasticBuffer: cannot be pickled, .* of a model save the state_dict"):
        pickle.dumps({"ep": buffer})


def test_handles(buffer: ElasticBuffer) -> None:
    idx = IDX.clone()
    copied, own = (dispatch(buffer, topk_idx=idx, do_handle_copy=copy)[3] for copy in (True, False))
    idx.fill_(0)
    assert_equal((copied.topk_idx, own.topk_idx), (IDX, idx))
    assert dispatch(buffer, num_sms=7)[3].num_sms == 7
    for copy_it in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="EPHandle: cannot be pickled"):
            copy_it(copied)


def test_results_are_no_views_and_need_no_gradient(buffer: ElasticBuffer) -> None:
    x = X.clone().requires_grad_()
    recv_x, _, recv_weights, handle, _ = dispatch(buffer, x=x)
    out, weights, _ = buffer.combine(recv_x, handle, recv_weights)
    assert not any(each.requires_grad for each in (recv_x, out, recv_weights, weights))
    again = dispatch(buffer, x=x)[0]
    recv_x.fill_(3.0)
    assert_equal(again, X[[0, 1, 2, 4]])


def test_events(buffer: ElasticBuffer) -> None:
    """On a CPU there is nothing to wait for."""
    event = dispatch(buffer, previous_event=buffer.capture(), allocate_on_comm_stream=True)[4]
    with event as entered:
        assert entered is event
    event.current_stream_wait(release_handle=True)
    assert event.event is None
    waited = []
    kept = EventOverlap(EventHandle(), (X,), lambda: waited.append(1))
    kept.current_stream_wait()
    assert kept.extra_tensors is None
    assert waited == [1]
    EventOverlap().current_stream_wait()


def test_a_failure_is_for_good(buffer: ElasticBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between a call's exchanges, such as no memory, leaves ranks apart: the buffer refuses further calls."""

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    handle = dispatch(buffer)[3]
    with monkeypatch.context() as patch:
        patch.setattr("tk_ep.collective.receive", fail)
        with pytest.raises(MemoryError):
            dispatch(buffer)
    for call in (lambda: dispatch(buffer), lambda: buffer.combine(X[:4], handle), buffer.check, buffer.destroy):
        with pytest.raises(RuntimeError, match="the buffer cannot be used any more, as an earlier call failed"):
            call()
    buffer.destroy()


def test_compiled(buffer: ElasticBuffer) -> None:
    """torch.compile breaks its graph at the calls."""

    def layer(x: Tensor) -> Tensor:
        rows, _, _, handle, _ = buffer.dispatch(x * 2, IDX, num_experts=4)
        return buffer.combine(rows * 2, handle)[0]

    # Token 1 has one expert, token 3 none.
    assert_equal(torch.compile(layer, backend="eager")(X), layer(X))


def test_errors_can_be_pickled() -> None:
    late, apart = EPTimeoutError("dispatch", 3, "waits"), UnsupportedTopologyError("no way", (0, 2))
    for error in (late, apart):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert (late.op, late.rank, apart.ranks) == ("dispatch", 3, (0, 2))


def test_fields_of_deep_ep() -> None:
    names = set(EPHandle.__dataclass_fields__)
    assert names >= {"num_sms", "topk_idx", "num_recv_tokens", "num_expanded_tokens", "recv_src_metadata"}
