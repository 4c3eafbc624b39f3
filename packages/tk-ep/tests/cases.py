"""Cases of dispatch and combine on all ranks of a group, on CPUs or GPUs: equal to the reference bit for bit."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tk_ep
import tk_gemm
import tk_quant
from tk_core import env
from tk_core.testing import assert_equal
from tk_ep import ElasticBuffer, EPHandle, EPTimeoutError, UnsupportedTopologyError, reference

from .compare import HIDDEN, OfBuffer, compare
from .ranks import Here, capturing, raises
from .routing import Routing, choose, random_routing, tokens, weights

LIMIT = 60


def make_buffer(here: Here, most: int = 40, group: dist.ProcessGroup | None = None, **options: Any) -> ElasticBuffer:
    """A buffer of this group, or the world, for rows of 64 channels."""
    options = {"num_cpu_timeout_secs": LIMIT, "num_gpu_timeout_secs": LIMIT, "backend": here.backend} | options
    return ElasticBuffer(group or here.world, num_max_tokens_per_rank=most, hidden=HIDDEN, **options)


def options_of(seed: int) -> dict[str, Any]:
    """Different options for different seeds, such that every pair of values occurs within 36."""
    do_expand = seed % 2 == 0
    return {
        "kind": ("bf16", "e4m3", "fp4")[seed % 3],
        "do_expand": do_expand,
        "do_cpu_sync": (None, False, True)[seed // 3 % 3],
        "do_zero_padding": do_expand and seed // 2 % 2 == 0,
        "use_tma_aligned_col_major_sf": seed // 4 % 2 == 0,
        "do_handle_copy": seed // 5 % 2 == 0,
    }


def compare_random(here: Here, buffer: ElasticBuffer, seed: int) -> None:
    """Calls of a random routing. On the symmetric backend they are of few kinds: each takes other kernels."""
    options, sizes = options_of(seed), None
    if here.backend == "symmetric":
        sizes, options["kind"] = (4, 4), "e4m3" if options["do_expand"] else "bf16"
    compare(OfBuffer(buffer), random_routing(seed, buffer.num_ranks, sizes=sizes), seed, **options)


def random_routings(here: Here, count: int = 200) -> None:
    """Routings on two buffers, one of which sums at the source alone; each rank is late now and then."""
    buffers = [make_buffer(here, 9, allow_multiple_reduction=reduce, num_topk=5) for reduce in (True, False)]
    for seed in range(count):
        time.sleep(0.02 if (seed + here.rank) % 61 == 0 else 0)
        compare_random(here, buffers[seed // 2 % 2], seed)
    for buffer in buffers:
        buffer.destroy()


def ranks_1_and_3(here: Here) -> None:
    """A group that is a part of the world."""
    if here.odd is None:
        return
    buffer = make_buffer(here, group=here.odd)
    assert (buffer.rank_idx, buffer.num_ranks) == (here.rank // 2, 2)
    for seed in range(36):
        compare_random(here, buffer, seed)
    buffer.destroy()


def extreme_routings(here: Here) -> None:
    """All tokens to one rank, or none; no tokens; one slot and 32; 1024 experts; int32 experts."""
    buffer = make_buffer(here, allow_multiple_reduction=False)
    count, generator = here.num_ranks, torch.Generator().manual_seed(3)

    def same(idx: Tensor) -> list[Tensor]:
        return [idx for _ in range(count)]

    lengths = range(0, 4 * count, 4)
    for number, (num_experts, topk_idx) in enumerate(
        (
            (2 * count, same(torch.tensor([[2, 3, -1]] * 40))),
            (2 * count, same(torch.full((7, 3), -1))),
            (2 * count, same(torch.empty((0, 3), dtype=torch.int64))),
            (
                2 * count,
                [torch.tensor([[2 * count - 1, 0]]).repeat(5 if rank == 1 else 0, 1) for rank in range(count)],
            ),
            (count, [choose(generator, 20, 1, count) for _ in range(count)]),
            (16 * count, [choose(generator, each, 32, 16 * count, none=0.0) for each in lengths]),
            (1024, [choose(generator, each, 8, 1024).clamp(-1, 2000).int() for each in lengths]),
        )
    ):
        routing = Routing(num_experts, 40, 128 if number % 2 else 1, topk_idx)
        for do_expand in (True, False):
            compare(OfBuffer(buffer), routing, number, do_expand=do_expand, do_cpu_sync=None if number else False)
    buffer.destroy()


def sums_in_order(here: Here) -> None:
    """Many tokens with values over 30 binades (see `wide`), whose sums have other bits in any other order."""
    generator = torch.Generator().manual_seed(5)
    topk_idx = [choose(generator, 40, 8, 4 * here.num_ranks, none=0.05) for _ in range(here.num_ranks)]
    for reduce in (True, False):
        buffer = make_buffer(here, allow_multiple_reduction=reduce)
        for seed in range(3):
            compare(OfBuffer(buffer), Routing(4 * here.num_ranks, 40, 1, topk_idx), seed, do_expand=True)
            compare(OfBuffer(buffer), Routing(4 * here.num_ranks, 40, 1, topk_idx), seed)
        buffer.destroy()


def a_user_of_deep_ep(here: Here) -> None:
    """The calls of a MoE layer that was written for DeepEP: forward and backward, then FP8 with tk-gemm's products."""
    import tk_ep as deep_ep

    group, rank, num_ranks = here.world, here.rank, here.num_ranks
    num_experts, num_topk, hidden = 4 * num_ranks, 3, 256
    size = deep_ep.ElasticBuffer.get_buffer_size_hint(group, 64, hidden, num_topk)
    options = {"explicitly_destroy": True, "backend": here.backend}
    buffer = deep_ep.ElasticBuffer(group, num_bytes=size, num_max_tokens_per_rank=64, **options)
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 40 + rank
    x = torch.randn((num_tokens, hidden), generator=generator).bfloat16().to(here.device)
    topk_idx = choose(generator, num_tokens, num_topk, num_experts).to(here.device, deep_ep.topk_idx_t)
    topk_weights = torch.rand((num_tokens, num_topk), generator=generator).to(here.device)
    num_sms = buffer.get_theoretical_num_sms(num_experts, num_topk)

    # Forward, beside other work of the compute stream.
    event = buffer.capture()
    recv_x, recv_topk_idx, recv_topk_weights, handle, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=num_experts,
        num_sms=num_sms,
        previous_event=event,
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert recv_topk_idx.max() < num_experts // num_ranks
    assert sum(handle.num_recv_tokens_per_expert_list) == (recv_topk_idx >= 0).sum()
    combined, combined_weights, event = buffer.combine(
        recv_x, handle, topk_weights=recv_topk_weights, previous_event=event, allocate_on_comm_stream=True
    )
    with event:
        homes = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx // (num_experts // num_ranks), -1)
        times = torch.tensor([len(set(each) - {-1}) for each in homes.tolist()], device=here.device)
    assert_equal(combined, (x.float() * times[:, None] + 0.0).bfloat16())
    assert_equal(combined_weights, torch.where(homes >= 0, topk_weights, 0.0))

    # Backward: of dispatch, combine; of combine, dispatch with its handle.
    grad, grad_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_topk_weights)
    assert_equal((grad, grad_weights), (combined, combined_weights))
    grad_recv_x, _, none, same, _ = buffer.dispatch(x, handle=handle)
    assert same is handle
    assert none is None
    assert_equal(grad_recv_x, recv_x)

    # FP8 rows of each expert, for grouped products.
    fp8 = tk_quant.per_token_cast(x, "e4m3", 128)
    recv, _, row_weights, handle, _ = buffer.dispatch(
        fp8,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=num_experts,
        expert_alignment=128,
        do_expand=True,
        do_zero_padding=True,
        use_tma_aligned_col_major_sf=True,
    )
    same_on_all = torch.Generator().manual_seed(99)
    w = torch.randn((num_experts, hidden, hidden), generator=same_on_all).bfloat16().to(here.device)
    data, sf = tk_quant.per_block_cast(w.flatten(0, 1), "e4m3", (128, 128))
    experts = data.unflatten(0, (num_experts, -1)), sf.unflatten(0, (num_experts, -1))
    mine = slice(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)
    ends = handle.psum_num_recv_tokens_per_expert
    local = experts[0][mine], experts[1][mine]
    out = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(recv, local, None, ends, use_psum_layout=True)
    by_id = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(recv, local, None, handle.pos_to_expert)
    has_token = handle.pos_to_expert >= 0
    assert_equal(out[has_token], by_id[has_token])
    out = (out * row_weights[:, None]).bfloat16()
    y, _, _ = buffer.combine(out, handle)
    exact = torch.zeros((num_tokens, hidden), device=here.device)
    for slot in range(num_topk):
        for expert in range(num_experts):
            token = (topk_idx[:, slot] == expert).nonzero()[:, 0]
            if len(token):
                pair = fp8[0][token], fp8[1][token]
                one = tk_gemm.fp8_gemm_nt(pair, (experts[0][expert], experts[1][expert]))
                exact[token] += one.float() * topk_weights[token, slot, None]
    assert (y.float() - exact).abs().max() < 0.02 * exact.abs().max()
    buffer.destroy()


def bad_arguments_of_one_rank(here: Here) -> None:
    """A call that is refused has sent nothing: the others do not notice."""
    buffer = make_buffer(here)

    def dispatch(num_tokens: int, hidden: int = HIDDEN) -> EPHandle:
        x = torch.zeros((num_tokens, hidden), dtype=torch.bfloat16, device=here.device)
        return buffer.dispatch(x, torch.zeros((num_tokens, 1), dtype=torch.int64, device=here.device), num_experts=4)[3]

    handle = dispatch(2)
    if here.rank == 1:
        with raises(ValueError, "x: ", "num_max_tokens_per_rank = 40", "got 41"):
            dispatch(41)
        with raises(ValueError, "num_bytes: ", "got 2097152"):
            dispatch(2, 300 * HIDDEN)
        with raises(ValueError, "x: expected shape"):
            buffer.combine(torch.zeros((3, HIDDEN), dtype=torch.bfloat16, device=here.device), handle)
    assert_equal(dispatch(2).topk_idx, handle.topk_idx)
    buffer.destroy()
    with raises(RuntimeError, "dispatch: the buffer is destroyed"):
        dispatch(2)
    buffer.destroy()


def faults_of_the_constructor(here: Here) -> None:
    """All ranks raise what one has found; and that ranks differ."""
    wrong = here.rank == 1
    with raises(ValueError, "" if wrong else "on rank 1: ", "num_topk: expected 0 to 32, got 33"):
        make_buffer(here, num_topk=33 if wrong else 3)
    with raises(TypeError, "" if wrong else "on rank 1: ", "use_fp8_dispatch: expected a bool, got 'no'"):
        make_buffer(here, use_fp8_dispatch="no" if wrong else False)
    with raises(ValueError, "num_bytes: expected the same on all ranks, got 4194304 on rank 0, 8388608 on rank 1"):
        make_buffer(here, num_bytes=8 << 20 if wrong else 4 << 20)
    with raises(ValueError, "hidden: expected a positive number of channels without num_bytes, got 0"):
        ElasticBuffer(here.world, num_max_tokens_per_rank=3)
    if here.device.type == "cpu":
        with raises(UnsupportedTopologyError, "symmetric"):
            make_buffer(here, backend="symmetric")
    with raises(TypeError, "group: expected a torch.distributed.ProcessGroup"):
        ElasticBuffer(None)


@contextmanager
def debug_mode() -> Iterator[None]:
    """TK_DEBUG=1."""
    os.environ["TK_DEBUG"] = "1"
    env.debug.cache_clear()
    try:
        yield
    finally:
        del os.environ["TK_DEBUG"]
        env.debug.cache_clear()


def differences_in_debug_mode(here: Here) -> None:
    """With TK_DEBUG all ranks raise what one has found, and name a rank that differs; then they go on."""
    buffer = make_buffer(here, num_bytes=16 << 20)
    x = torch.zeros((2, 2 * HIDDEN), dtype=torch.bfloat16, device=here.device)
    idx = torch.tensor([[0, 1], [2, -1]], device=here.device)
    differs = here.rank == 1

    def dispatch(x: Any = x, idx: Tensor = idx, **options: Any) -> EPHandle:
        return buffer.dispatch(x, idx, **({"num_experts": 2 * here.num_ranks} | options))[3]

    with debug_mode():
        with raises(ValueError, "columns of x: expected the same on all ranks, got 128 on rank 0, 64 on rank 1"):
            dispatch(x[:, :HIDDEN].contiguous() if differs else x)
        with raises(ValueError, "num_experts: ", "got 8 on rank 0, 4 on rank 1"):
            dispatch(num_experts=4 if differs else 8)
        with raises(ValueError, "bytes of an element of x: "):
            dispatch((x.to(torch.float8_e4m3fn), torch.ones((2, 1), device=here.device)) if differs else x)
        with raises(ValueError, "do_expand: "):
            dispatch(do_expand=differs)
        with raises(ValueError, "" if differs else "on rank 1: ", "topk_idx[1]: expected an expert once in a token"):
            dispatch(idx=torch.tensor([[0, 1], [2, 2]], device=here.device) if differs else idx)
        with raises(TypeError, "" if differs else "on rank 1: ", "x: expected dtype torch.bfloat16"):
            dispatch(x.float() if differs else x)
        with raises(RuntimeError, "" if differs else "on rank 1: ", "dispatch: drops the gradient of x"):
            dispatch(x.clone().requires_grad_(differs))
        handle = dispatch()
        rows = torch.zeros((handle.num_recv_tokens, HIDDEN), dtype=torch.bfloat16, device=here.device)
        with raises(ValueError, "op: ", "rank 0 and rank 1 make different calls"):
            buffer.combine(rows, handle) if differs else dispatch()
        buffer.combine(rows, handle)
    dispatch()
    buffer.destroy()


def other_methods(here: Here) -> None:
    """Barriers, sizes and attributes."""
    buffer = make_buffer(here, num_topk=2)
    for comm_stream in (True, False):
        early = time.monotonic()
        if here.rank == 0:
            time.sleep(0.2)
        buffer.barrier(use_comm_stream=comm_stream, with_cpu_sync=True)
        assert here.rank == 0 or time.monotonic() - early > 0.1
    assert buffer.backend == here.backend
    assert (buffer.get_comm_stream() is None) == (here.device.type == "cpu")
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, here.num_ranks)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.scaleup_rank_idx) == (
        1,
        here.num_ranks,
        here.rank,
    )
    assert buffer.get_theoretical_num_sms(8, 2) == 24
    assert make_buffer(here, prefer_overlap_with_compute=False).get_theoretical_num_sms(8, 2) == 48
    assert buffer.get_theoretical_num_qps(24) == 0
    # R · 1024 rows of 14336 bytes and 68 for 8 slots, as many of 14336 and 36, all to 128 bytes. With FP8 dispatched
    # rows have 7168, 224 and 68 bytes. Without multiple reduction 8 · 1024 rows come back.
    sizes = {2: (58, 44, 128), 4: (114, 88, 144)}[here.num_ranks]
    for mib, options in zip(sizes, ((), (True,), (True, True, False))):
        assert ElasticBuffer.get_buffer_size_hint(here.world, 1024, 7168, 8, *options) == mib << 20
    buffer.check()
    buffer.destroy()


def rank_1_is_waited_for(here: Here) -> None:
    """A rank that is late within the limits."""
    buffer = make_buffer(here, num_topk=4)
    for seed in (0, 2):
        if here.rank == 1:
            time.sleep(5)
        compare_random(here, buffer, seed)
    buffer.destroy()


def some_tokens(here: Here, seed: int) -> tuple[Routing, list[Tensor], list[Tensor]]:
    """A routing with four slots and experts a rank, and tokens and weights of all ranks: other counts on each rank."""
    generator = torch.Generator().manual_seed(seed)
    idx = [choose(generator, 40 - 3 * rank, 4, 4 * here.num_ranks) for rank in range(here.num_ranks)]
    routing = Routing(4 * here.num_ranks, 40, 1, idx)
    return routing, tokens(routing, HIDDEN, seed), weights(routing, seed)


def equal_bits_in_all_runs(here: Here) -> None:
    """A hundred times the same calls."""
    buffer, first = make_buffer(here, num_topk=4), None
    routing, x, w = some_tokens(here, 0)
    x, idx, w = (each[here.rank].to(here.device) for each in (x, routing.topk_idx, w))
    for _ in range(100):
        rows, _, row_weights, handle, _ = buffer.dispatch(x, idx, w, num_experts=routing.num_experts, do_expand=True)
        results = rows, row_weights, handle.recv_src_metadata, *buffer.combine(rows, handle, row_weights)[:2]
        first = first or results
        assert_equal(results, first)
    buffer.destroy()


def streams_and_events(here: Here) -> None:
    """What calls wait for, and what waits for them."""
    buffer = make_buffer(here, num_topk=4)
    routing, x, w = some_tokens(here, 0)
    x, idx, w = (each[here.rank].to(here.device) for each in (x, routing.topk_idx, w))
    current, comm = torch.cuda.current_stream(), buffer.get_comm_stream()
    options = {"num_experts": routing.num_experts, "do_expand": True, "do_zero_padding": True, "do_cpu_sync": False}
    rows, _, row_weights, handle, _ = buffer.dispatch(x, idx, w, **options)
    combined = buffer.combine(rows, handle, row_weights)[:2]
    used = slice(int(handle.psum_num_recv_tokens_per_expert[-1]))

    # Calls wait for what the current stream was given before; their inputs may be freed, and their memory used again.
    torch.cuda._sleep(200_000_000)
    late = x.clone()
    got, _, _, again, event = buffer.dispatch(late, idx, w, async_with_compute_stream=True, **options)
    del late
    for _ in range(8):
        torch.full_like(x, 7.0)
    with event:
        assert not current.query()
    assert_equal(got[used], rows[used])
    got, got_weights, event = buffer.combine(got, again, row_weights, async_with_compute_stream=True)
    event.current_stream_wait(release_handle=True)
    assert_equal((got, got_weights), combined)

    # With previous_event they wait for that alone.
    before = buffer.capture()
    torch.cuda._sleep(2_000_000_000)
    own = {"previous_event": before, "allocate_on_comm_stream": True, "async_with_compute_stream": True}
    got, _, _, again, event = buffer.dispatch(x, idx, w, **own, **options)
    _, _, event = buffer.combine(got, again, row_weights, **own | {"previous_event": event})
    comm.synchronize()
    assert not current.query(), "the calls have waited for the current stream"
    event.current_stream_wait()
    assert_equal(got[used], rows[used])

    # Receiving waits for previous_event_before_epilogue.
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        before = buffer.capture()
    buffer.dispatch(x, idx, w, previous_event_before_epilogue=before, async_with_compute_stream=True, **options)
    comm.synchronize()
    assert side.query()
    buffer.destroy()


def graphs(here: Here) -> None:
    """Replays on other tokens and routings, in turn with eager calls on the same buffer, ranks late now and then."""
    buffer = make_buffer(here, num_topk=4)
    options = {"num_experts": 4 * here.num_ranks, "do_expand": True, "do_zero_padding": True, "do_cpu_sync": False}
    inputs = [some_tokens(here, seed) for seed in range(4)]

    def of(number: int) -> list[Tensor]:
        routing, x, w = inputs[number]
        return [each[here.rank].to(here.device) for each in (x, routing.topk_idx, w)]

    x, idx, w = of(0)

    def call() -> tuple[Tensor, ...]:
        rows, _, row_weights, handle, _ = buffer.dispatch(x, idx, w, **options)
        return rows, row_weights, handle.recv_src_metadata, buffer.combine(rows, handle)[0]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        results = call()
    with raises(ValueError, "do_cpu_sync: expected False"), capturing(torch.cuda.CUDAGraph()):
        buffer.dispatch(x, idx, w, **options | {"do_cpu_sync": True})
    for number in range(12):
        for mine, new in zip((x, idx, w), of(number % 4)):
            mine.copy_(new)
        if number % 3 == 2:
            call()
        time.sleep(0.02 if (number + here.rank) % 4 == 0 else 0)
        graph.replay()
        routing, tokens_of_ranks, weights_of_ranks = inputs[number % 4]
        lists = tokens_of_ranks, routing.topk_idx, weights_of_ranks
        rows, _, row_weights, handles = reference.dispatch(*lists, num_max_tokens_per_rank=40, **options)
        end = int(handles[here.rank].psum_num_recv_tokens_per_expert[-1])
        got_rows, *got = (each.cpu() for each in results)
        assert_equal(got_rows[:end], rows[here.rank][:end])
        combined = reference.combine(rows, handles)[0]
        assert_equal(got, [row_weights[here.rank], handles[here.rank].recv_src_metadata, combined[here.rank]])
    buffer.destroy()


def split_calls() -> AbstractContextManager[object]:
    """Dispatches are split, whatever their bytes."""
    return mock.patch("tk_ep.symmetric.rank.SPLIT_BYTES", 0)


def in_split_calls(here: Here) -> None:
    """Where a rank copies its own tokens beside what it sends: results, streams, events, graphs."""
    with split_calls():
        random_routings(here, 72)
        streams_and_events(here)
        graphs(here)


def split_on_some_ranks(here: Here) -> None:
    """Ranks need not agree on it."""
    buffer = make_buffer(here, 9, num_topk=5)
    for seed in range(36):
        with split_calls() if (seed + here.rank) % 2 else nullcontext():
            compare_random(here, buffer, seed)
    buffer.destroy()


def nothing_is_captured(here: Here) -> None:
    """The collective backend, and calls without routing, refuse to be captured."""
    buffer = make_buffer(here)
    x, idx = (
        torch.zeros((2, HIDDEN), device=here.device).bfloat16(),
        torch.zeros((2, 1), dtype=torch.int64, device=here.device),
    )
    buffer.dispatch(x, idx, num_experts=here.num_ranks)
    for call in (
        lambda: buffer.dispatch(x, idx, num_experts=here.num_ranks, do_cpu_sync=False),
        lambda: buffer.engram_write(x),
    ):
        with raises(RuntimeError, "CUDA graphs cannot capture it"), capturing(torch.cuda.CUDAGraph()):
            call()
    buffer.destroy()


SHORT = 1.0


def lose_rank_1(here: Here, how: Callable[[], None]) -> None:
    """After rank 1 has met its fate, the others raise within the limit, and at every later call."""
    x = torch.zeros((2, HIDDEN), dtype=torch.bfloat16, device=here.device)
    idx = torch.zeros((2, 1), dtype=torch.int64, device=here.device)
    # Kernels and connections are made before the limit is short.
    other = make_buffer(here)
    other.dispatch(x, idx, num_experts=here.num_ranks)
    other.destroy()
    is_symmetric = here.backend == "symmetric"
    limits = {"num_gpu_timeout_secs": SHORT, "num_cpu_timeout_secs": (3 if is_symmetric else 1) * SHORT}
    buffer = make_buffer(here, **limits)
    handle = buffer.dispatch(x, idx, num_experts=here.num_ranks)[3]
    if here.rank == 1:
        how()
    begin = time.monotonic()
    what = "waited 1 s for rank 1, which is 1 calls behind"
    what = what if is_symmetric else "heard nothing from a peer, with a limit of 1 s"
    with raises(EPTimeoutError, f"dispatch: rank {here.rank} {what}"):
        buffer.dispatch(x, idx, num_experts=here.num_ranks)
    assert time.monotonic() - begin < 4 * SHORT
    rows = torch.zeros((handle.num_recv_tokens, HIDDEN), dtype=torch.bfloat16, device=here.device)
    for call in (
        lambda: buffer.dispatch(x, idx, num_experts=here.num_ranks),
        lambda: buffer.combine(rows, handle),
        buffer.barrier,
        buffer.check,
        tk_ep.EventOverlap(check=buffer.check).current_stream_wait,
        buffer.destroy,
    ):
        with raises(EPTimeoutError, "dispatch: rank"):
            call()
    buffer.destroy()


def rank_1_is_killed(here: Here) -> None:
    """A rank that is gone without a word."""
    lose_rank_1(here, lambda: os._exit(9))


def rank_1_is_killed_in_split_calls(here: Here) -> None:
    """The same where the others wait for its counts first."""
    with split_calls():
        lose_rank_1(here, lambda: os._exit(9))


def rank_1_raises(here: Here) -> None:
    """A rank that leaves by an error."""
    lose_rank_1(here, lambda: 1 // 0)
