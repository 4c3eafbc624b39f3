"""LocalGroup: the symmetric backend's kernels against the reference, and what the group refuses.

On a CPU the reference serves LocalGroup, so there only arguments are tested.
"""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tk_core.arch import arch_from_name
from tk_core.kernel import capture, recorded_launches
from tk_core.testing import assert_equal, poisoned_allocations
from tk_core.testing.trees import transfer
from tk_core.testing.usage import lower, resource_usages
from tk_ep import EPHandle, EPTimeoutError, LocalGroup, reference
from tk_ep.all_ranks import combine_requests, dispatch_requests
from tk_ep.check import DispatchRequest, DispatchResult
from tk_ep.handle import Place
from tk_ep.symmetric import rank as rank_module
from tk_ep.symmetric.rank import Rank

from .compare import HIDDEN, OfGroup, compare
from .launches import check_arguments
from .routing import Routing, choose, tokens, weights

SM_90A = arch_from_name("sm_90a")
KINDS = ("bf16", "e4m3", "fp4")


def make_group(num_ranks: int, most: int = 40, device: str = "cuda", **options: Any) -> LocalGroup:
    """A group for rows of 64 channels."""
    return LocalGroup(num_ranks, device, **{"num_max_tokens_per_rank": most, "hidden": HIDDEN} | options)


def routing_of(num_ranks: int, seed: int, alignment: int, most: int = 40) -> Routing:
    """Four experts on each rank and six slots; the second rank has no tokens, the first as many as it may."""
    generator = torch.Generator().manual_seed(seed)
    counts = [most, 0, *(int(torch.randint(0, most, (), generator=generator)) for _ in range(num_ranks))]
    idx = [choose(generator, count, 6, 4 * num_ranks) for count in counts[:num_ranks]]
    return Routing(4 * num_ranks, most, alignment, idx)


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether dispatches are split, whatever their bytes."""
    monkeypatch.setattr(rank_module, "SPLIT_BYTES", 0 if request.param else 2**62)
    return request.param


# ---- arguments


@pytest.mark.parametrize(
    ("num_ranks", "changes", "kind", "match"),
    [
        (0, {}, ValueError, "num_ranks: expected 1 to 8, got 0"),
        (9, {}, ValueError, "num_ranks: expected 1 to 8, got 9"),
        (2, {"hidden": 0}, ValueError, "hidden: expected 1 to"),
        (2, {"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank: expected 1 to"),
        (2, {"num_bytes": 0}, ValueError, "num_bytes: expected 1 to"),
        (2, {"num_topk": 33}, ValueError, "num_topk: expected 0 to 32"),
        (2, {"use_fp8_dispatch": 1}, TypeError, "use_fp8_dispatch: expected a bool"),
        (2, {"allow_multiple_reduction": 1}, TypeError, "allow_multiple_reduction: expected a bool"),
    ],
)
def test_bad_group(num_ranks: int, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make_group(num_ranks, device="cpu", **changes)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"topk_idx": torch.zeros((4, 2))}, TypeError, "topk_idx: expected a list with an item for each rank"),
        ({"topk_weights": [torch.zeros(4, 6)]}, ValueError, "topk_weights: expected 2 items, got 1"),
        ({"num_max_tokens_per_rank": 2**14}, ValueError, "num_bytes: expected a buffer of"),
        ({"num_max_tokens_per_rank": 39}, ValueError, "x: expected at most num_max_tokens_per_rank = 39 rows, got 40"),
        (
            {"num_max_tokens_per_rank": 2**22, "num_experts": 1024},
            ValueError,
            r"expected fewer than 2\*\*31 tokens · num_experts",
        ),
        ({"do_expandd": True}, TypeError, "do_expandd"),
    ],
)
def test_bad_dispatch(changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    routing = routing_of(2, 0, 1)
    with pytest.raises(kind, match=match):
        make_group(2, device="cpu").dispatch(
            **{"x": tokens(routing, HIDDEN), "topk_idx": routing.topk_idx, "num_experts": 8} | changes
        )


def test_ranks_that_differ() -> None:
    idx = [torch.zeros((3, 2), dtype=torch.int64), torch.zeros((3, 1), dtype=torch.int64)]
    x = [torch.zeros(3, HIDDEN).bfloat16()] * 2
    with pytest.raises(ValueError, match="columns of topk_idx: expected the same on all ranks, 2 on rank 0, got 1"):
        make_group(2, device="cpu").dispatch(x, idx, num_experts=4)


@pytest.mark.parametrize("reduce", [True, False])
def test_on_a_cpu(reduce: bool) -> None:
    """The reference's results, and handles of this group only."""
    group = make_group(3, device="cpu", allow_multiple_reduction=reduce)
    routing = routing_of(3, 1, 4)
    compare(OfGroup(group), routing, 1, do_expand=True)
    *_, handles = reference.dispatch(tokens(routing, HIDDEN), routing.topk_idx, num_experts=12)
    with pytest.raises(ValueError, match="handle: expected one of this buffer's group"):
        group.dispatch(tokens(routing, HIDDEN), handle=handles)


# ---- kernels compile


def captured(kind: str, do_expand: bool, idx_dtype: torch.dtype, reduce: bool, num_biases: int) -> list[Any]:
    """The launches of a dispatch, one with its handle and weights, and a combine, with DeepSeek-V3's sizes."""
    with capture(SM_90A), recorded_launches() as recorded:
        group = make_group(4, 128, "meta", hidden=7168, num_topk=8, allow_multiple_reduction=reduce)
        x: Any = torch.empty((100, 7168), dtype=torch.bfloat16, device="meta")
        bias = (x,) * num_biases
        if kind != "bf16":
            data = torch.empty((100, 7168), dtype=torch.float8_e4m3fn, device="meta")
            x = data, torch.empty_strided((100, 56), (1, 100), device="meta")
        idx = torch.empty((100, 8), dtype=idx_dtype, device="meta")
        w = torch.empty((100, 8), device="meta")
        stats = [torch.empty(64, dtype=torch.int32, device="meta")] * 4
        options = {"do_expand": do_expand, "do_zero_padding": do_expand, "use_tma_aligned_col_major_sf": do_expand}
        *_, handles = group.dispatch(
            [x] * 4, [idx] * 4, None if reduce else [w] * 4, stats, num_experts=256, do_cpu_sync=False, **options
        )
        _, _, row_weights, _ = group.dispatch([x] * 4, topk_weights=[w] * 4, handle=handles, **options)
        count = handles[0].num_expanded_tokens if do_expand else handles[0].num_recv_tokens
        rows = torch.empty((count, 7168), dtype=torch.bfloat16, device="meta")
        group.combine([rows] * 4, handles, row_weights, [bias] * 4)
    return recorded.launches


@pytest.mark.compile
def test_compile() -> None:
    """Each code path, without local memory, within the shared memory of a thread block."""
    launches = [
        *captured("bf16", False, torch.int64, True, 0),
        *captured("e4m3", False, torch.int32, False, 1),
        *captured("bf16", True, torch.int32, True, 2),
        *captured("e4m3", True, torch.int64, False, 0),
    ]
    arguments = dict(launches)
    lowered = [lower(each.kernel, *each.args, simplified=False) for each in arguments]
    for (request, args), usage in zip(arguments.items(), resource_usages(list(arguments), lowered)):
        for used in usage.values():
            assert used.stack_bytes == 0, f"{request}: registers were spilled"
            assert used.shared_bytes <= SM_90A.max_shared_memory, request
        check_arguments(request, args)


# ---- kernels against the reference


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.usefixtures("split")
def test_calls(num_ranks: int, do_expand: bool, kind: str) -> None:
    """Alignments, exact and largest sizes, layouts of factors, zeroed padding, biases; several calls on one group."""
    group = make_group(num_ranks, allow_multiple_reduction=num_ranks != 4)
    for seed, (alignment, sync) in enumerate(((1, None), (128, None), (128, False), (3, False))):
        options = {
            "do_expand": do_expand,
            "do_cpu_sync": sync,
            "do_zero_padding": do_expand and seed % 2 == 1,
            "use_tma_aligned_col_major_sf": seed % 2 == 1,
            "do_handle_copy": seed % 2 == 0,
            "num_sms": (0, 1, 3, 132)[seed],
        }
        with poisoned_allocations():
            compare(OfGroup(group), routing_of(num_ranks, seed, alignment), seed, kind, **options)


def extremes() -> dict[str, tuple[int, list[Tensor]]]:
    """Numbers of experts and slots of two ranks."""
    generator = torch.Generator().manual_seed(3)
    none = torch.empty((0, 3), dtype=torch.int64)
    return {
        "all to one rank": (4, [torch.tensor([[2, 3, -1]]).repeat(40, 1)] * 2),
        "to no rank": (4, [torch.full((7, 3), -1)] * 2),
        "no tokens": (4, [none] * 2),
        "one rank's tokens": (4, [none.view(0, 2), torch.tensor([[3, 0]]).repeat(5, 1)]),
        "one slot": (2, [choose(generator, 20, 1, 2) for _ in range(2)]),
        "32 slots": (64, [choose(generator, count, 32, 64, none=0.0) for count in (40, 33)]),
        "1024 experts": (1024, [choose(generator, count, 8, 1024).clamp(-1, 2000).int() for count in (40, 11)]),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("name", list(extremes()))
@pytest.mark.usefixtures("split")
def test_extremes(name: str, do_expand: bool, reduce: bool) -> None:
    num_experts, topk_idx = extremes()[name]
    group = make_group(2, allow_multiple_reduction=reduce)
    for sync in (None, False):
        routing = Routing(num_experts, 40, 128 if sync is None else 1, topk_idx)
        with poisoned_allocations():
            compare(OfGroup(group), routing, 2, do_expand=do_expand, do_cpu_sync=sync)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", [True, False])
def test_more_ranks_than_slots(reduce: bool) -> None:
    """Rows come back to the places of slots, not of ranks."""
    generator = torch.Generator().manual_seed(4)
    routing = Routing(16, 40, 1, [choose(generator, 40 - rank, 3, 16) for rank in range(8)])
    group = make_group(8, num_topk=3, allow_multiple_reduction=reduce)
    for do_expand in (False, True):
        with poisoned_allocations():
            compare(OfGroup(group), routing, 1, do_expand=do_expand)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.usefixtures("split")
def test_an_expert_twice_in_a_token(reduce: bool) -> None:
    """Each slot has a row while there are rows; the others' are left out."""
    group = make_group(2, 4, allow_multiple_reduction=reduce)
    routing = Routing(2, 4, 1, [torch.zeros((4, 3), dtype=torch.int64), torch.ones((0, 3), dtype=torch.int64)])
    for sync in (None, False):
        with poisoned_allocations():
            compare(OfGroup(group), routing, 1, do_expand=True, do_cpu_sync=sync)


@pytest.mark.gpu
def test_random_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 on two groups, with sizes, areas and layouts that change from call to call; some are split."""
    groups = [make_group(3, num_bytes=4 << 20, allow_multiple_reduction=reduce) for reduce in (True, False)]
    generator = torch.Generator().manual_seed(8)
    for seed in range(200):
        most = int(torch.randint(1, 41, (), generator=generator))
        counts = torch.randint(0, most + 1, (3,), generator=generator).tolist()
        idx = [choose(generator, count, 4, 12) for count in counts]
        routing = Routing(12, most, 1 + seed % 5, idx)
        options = {"do_expand": seed % 3 > 0, "do_cpu_sync": (None, False)[seed // 3 % 2]}
        monkeypatch.setattr(rank_module, "SPLIT_BYTES", 0 if seed // 5 % 2 else 2**62)
        with poisoned_allocations():
            compare(OfGroup(groups[seed // 2 % 2]), routing, seed, **options)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.usefixtures("split")
def test_model_shape(reduce: bool) -> None:
    """Many warps and blocks at work on long rows; tokens enough for several parts of `route`."""
    generator = torch.Generator().manual_seed(6)
    routing = Routing(64, 4200, 128, [choose(generator, count, 8, 64, none=0.05) for count in (4200, 77)])
    group = make_group(2, 4200, hidden=512, num_topk=8, allow_multiple_reduction=reduce)
    with poisoned_allocations():
        compare(OfGroup(group), routing, 2, "e4m3", 512, do_expand=True, use_tma_aligned_col_major_sf=True)
    routing = Routing(64, 300, 128, [choose(generator, count, 8, 64, none=0.05) for count in (300, 299)])
    group = make_group(2, 300, hidden=7168, num_topk=8, allow_multiple_reduction=reduce)
    for do_expand in (False, True):
        with poisoned_allocations():
            compare(OfGroup(group), routing, 2, hidden=7168, do_expand=do_expand)


@pytest.mark.gpu
def test_inputs_at_odd_addresses() -> None:
    """x that begins at no multiple of 16 bytes, which bulk copies cannot read."""
    group, routing = make_group(2), routing_of(2, 1, 1)
    x = [torch.cat((each.new_zeros(1), each.flatten())).cuda()[1:].view_as(each) for each in tokens(routing, HIDDEN)]
    idx = transfer(routing.topk_idx, "cuda")
    recv_x, _, _, handles = group.dispatch(x, idx, num_experts=8)
    assert_equal(recv_x, reference.dispatch([each.clone() for each in x], idx, num_experts=8)[0])
    rows = [torch.cat((each.new_zeros(1), each.flatten()))[1:].view_as(each) for each in recv_x]
    assert_equal(group.combine(rows, handles), group.combine(recv_x, handles))


@pytest.mark.gpu
def test_equal_bits_in_all_runs() -> None:
    group = make_group(4, 400)
    routing = routing_of(4, 5, 1, 400)
    x, idx, w = transfer((tokens(routing, HIDDEN), routing.topk_idx, weights(routing)), "cuda")
    first = None
    for _ in range(100):
        recv_x, _, row_weights, handles = group.dispatch(x, idx, w, num_experts=16, do_expand=True)
        out, out_weights = group.combine(recv_x, handles, row_weights)
        results = recv_x, row_weights, out, out_weights, [each.recv_src_metadata for each in handles]
        first = first or results
        assert_equal(results, first)


@pytest.mark.gpu
@pytest.mark.usefixtures("split")
def test_cuda_graph() -> None:
    """Replays, with other tokens and routings in the captured inputs, in turn with eager calls on the same group."""
    group, options = make_group(2), {"num_experts": 8, "do_cpu_sync": False, "do_expand": True, "do_zero_padding": True}
    routings = [routing_of(2, seed, 1) for seed in range(4)]  # All with 40 and no tokens.
    inputs = [(tokens(each, HIDDEN, seed), each.topk_idx, weights(each, seed)) for seed, each in enumerate(routings)]
    x, idx, w = transfer(inputs[0], "cuda")

    def call() -> tuple:
        recv_x, _, row_weights, handles = group.dispatch(x, idx, w, **options)
        return recv_x, row_weights, [each.recv_src_metadata for each in handles], *group.combine(recv_x, handles)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_results = call()
    for number, one in enumerate(inputs * 3):
        for mine, new in zip((x, idx, w), one):
            for a, b in zip(mine, new):
                a.copy_(b)
        if number % 3 == 2:
            group.dispatch(x, idx, w, **options)
        graph.replay()
        want_x, _, want_w, handles = reference.dispatch(x, idx, w, num_max_tokens_per_rank=40, **options)
        ends = [int(each.psum_num_recv_tokens_per_expert[-1]) for each in handles]
        recv_x, row_weights, metadata, out, _ = captured_results
        assert_equal([a[:end] for a, end in zip(recv_x, ends)], [a[:end] for a, end in zip(want_x, ends)])
        assert_equal(row_weights, want_w)
        assert_equal(metadata, [each.recv_src_metadata for each in handles])
        assert_equal(out, reference.combine(want_x, handles)[0])
    with (
        pytest.raises(ValueError, match="do_cpu_sync: expected False within a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        group.dispatch(x, idx, w, num_experts=8)


# ---- ranks that wait


def two_ranks(timeout_secs: float, beside: bool = False) -> list[Rank]:
    """Virtual ranks, to be called one by one."""
    device = torch.device("cuda", 0)
    buffers = tuple(torch.zeros((1 << 17, 4), dtype=torch.int32, device=device) for _ in range(2))
    places = [Place("two", rank, 2, device) for rank in range(2)]
    streams = [torch.cuda.Stream() if beside else None for _ in places]
    return [Rank(place, buffers, 2 << 20, 24, timeout_secs, stream) for place, stream in zip(places, streams)]


def dispatches_of(ranks: list[Rank], seed: int, **options: Any) -> list[DispatchRequest]:
    """A dispatch of two ranks, of which the first has 40 tokens, the second none or, for odd seeds, 23."""
    generator = torch.Generator().manual_seed(seed)
    routing = Routing(8, 40, 1, [choose(generator, count, 6, 8) for count in (40, 23 * (seed % 2))])
    x, idx, w = transfer((tokens(routing, HIDDEN, seed), routing.topk_idx, weights(routing, seed)), "cuda")
    lists = {"x": x, "topk_idx": idx, "topk_weights": w, "cumulative_local_expert_recv_stats": None, "handle": None}
    return dispatch_requests([each.place for each in ranks], 40, lists, {"num_experts": 8} | options)


def all_zero(handle: EPHandle) -> bool:
    """Whether a handle has no tokens."""
    counts = [getattr(handle, f"psum_num_recv_tokens_per_{name}") for name in ("scaleup_rank", "expert")]
    counts.append(handle.num_unaligned_recv_tokens_per_expert)
    return (handle.recv_src_metadata == -1).all() and not any(each.any() for each in counts)


@pytest.mark.gpu
@pytest.mark.usefixtures("split")
def test_a_rank_that_does_not_come() -> None:
    """The other's waits end at their limit, its results say so, and later calls do not wait again."""
    ranks = two_ranks(0.05)
    places = [each.place for each in ranks]
    both = dispatches_of(ranks, 2, do_cpu_sync=False)
    calls = [rank.push_tokens(request) for rank, request in zip(ranks, both)]
    for rank, call in zip(ranks, calls):
        rank.count(call, 1.0)
    handles = [rank.receive(call).handle for rank, call in zip(ranks, calls)]
    torch.cuda.synchronize()
    for rank in ranks:
        rank.check()

    call = ranks[0].push_tokens(both[0])
    ranks[0].count(call, 1.0)
    with poisoned_allocations():
        result = ranks[0].receive(call)
    torch.cuda.synchronize()
    assert (result.recv_topk_idx == -1).all()
    assert all_zero(result.handle)
    with pytest.raises(EPTimeoutError, match=r"dispatch: rank 0 waited 0.05 s for rank 1, which is 1 calls behind"):
        ranks[0].check()
    ranks[1].check()

    rows = [torch.ones((each.num_recv_tokens, HIDDEN), device="cuda").bfloat16() for each in handles]
    one = combine_requests(
        places, {"x": rows, "handle": handles, "topk_weights": None, "bias": None}, 0, allow_multiple_reduction=True
    )
    ranks[0].push_rows(one[0])  # Compiled before the time is taken.
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(10):
        call = ranks[0].push_rows(one[0])
        ranks[0].wait(call)
        out = ranks[0].sum(call).combined_x
    assert out.isnan().all()
    assert time.monotonic() - start < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("do_expand", [False, True])
def test_a_rank_that_tells_counts_and_no_more(do_expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has received its own tokens by then: its results have none all the same."""
    monkeypatch.setattr(rank_module, "SPLIT_BYTES", 0)
    ranks = two_ranks(0.05)
    both = dispatches_of(ranks, 1, do_cpu_sync=False, do_expand=do_expand)
    call = ranks[0].push_tokens(both[0])
    with monkeypatch.context() as patched:
        patched.setattr(rank_module, "push_tokens_kernel", lambda *_: lambda *_: None)
        ranks[1].push_tokens(both[1])
    ranks[0].count(call, 1.0)
    torch.cuda.synchronize()
    ranks[0].check()
    assert call.psum_per_rank[1] > call.psum_per_rank[0] > 0
    with poisoned_allocations():
        result = ranks[0].receive(call)
    torch.cuda.synchronize()
    assert all_zero(result.handle)
    if do_expand:
        assert (result.handle.pos_to_expert == -1).all()
        assert not result.recv_topk_weights.any()
    else:
        assert (result.recv_topk_idx == -1).all()
    with pytest.raises(EPTimeoutError, match=r"dispatch: rank 0 waited 0.05 s for rank 1, which is 1 calls behind"):
        ranks[0].check()


@pytest.mark.gpu
@pytest.mark.parametrize("sync", [None, False])
def test_ranks_that_wait_for_each_other(sync: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split on one rank, with a stream beside the rank's, and not on the other: results are those of ranks in turn."""
    ranks, in_turn = two_ranks(20.0, beside=True), two_ranks(20.0)
    streams = [torch.cuda.Stream() for _ in ranks]

    def dispatch(ranks: list[Rank], seed: int, own_streams: bool) -> list[DispatchResult]:
        calls, results = [], []
        with poisoned_allocations():
            requests = dispatches_of(ranks, seed, do_cpu_sync=sync, do_expand=seed % 2 == 0)
            torch.cuda.synchronize()
            of_ranks = streams if own_streams else [torch.cuda.current_stream()] * 2
            for each, request, stream in zip(ranks, requests, of_ranks):
                monkeypatch.setattr(
                    rank_module, "SPLIT_BYTES", 0 if own_streams and each.place.rank == seed % 2 else 2**62
                )
                with torch.cuda.stream(stream):
                    calls.append(each.push_tokens(request))
            for each, call, stream in zip(ranks, calls, of_ranks):
                with torch.cuda.stream(stream):
                    each.count(call, 20.0)
            for each, call, stream in zip(ranks, calls, of_ranks):
                with torch.cuda.stream(stream):
                    results.append(each.receive(call))
            torch.cuda.synchronize()
        return results

    for seed in range(8):
        got, want = dispatch(ranks, seed, own_streams=True), dispatch(in_turn, seed, own_streams=False)
        for mine, theirs in zip(got, want):
            end = int(theirs.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            if theirs.handle.do_expand:
                end = int(theirs.handle.psum_num_recv_tokens_per_expert[-1])
            assert_equal(mine.recv_x[:end], theirs.recv_x[:end])
            assert_equal(mine.recv_topk_weights[:end], theirs.recv_topk_weights[:end])
            assert_equal(mine.handle.recv_src_metadata, theirs.handle.recv_src_metadata)
            assert_equal(mine.handle.dst_buffer_slot_idx, theirs.handle.dst_buffer_slot_idx)
    for each in (*ranks, *in_turn):
        each.check()


@pytest.mark.gpu
def test_barrier() -> None:
    """Ranks on streams of their own wait for each other, and work of both goes on behind it."""
    ranks = two_ranks(20.0)
    streams = [torch.cuda.Stream() for _ in ranks]
    torch.cuda.synchronize()
    for _ in range(3):
        for rank, stream in zip(ranks, streams):
            with torch.cuda.stream(stream):
                rank.barrier()
    torch.cuda.synchronize()
    for rank in ranks:
        rank.check()
    start = time.monotonic()
    late = two_ranks(0.1)
    late[1].barrier()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    with pytest.raises(EPTimeoutError, match=r"barrier: rank 1 waited 0.1 s for rank 0"):
        late[1].check()
