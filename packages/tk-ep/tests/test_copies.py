"""The symmetric backend's all_gather, pp_send, pp_recv and engram_fetch, of virtual ranks on one device.

On a CPU the warp that waits and tells is emulated, so that the steps and the copies are tested there, too.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tk_core.arch import arch_from_name
from tk_core.kernel import capture, recorded_launches
from tk_core.testing import assert_equal, poisoned_allocations
from tk_core.testing.usage import lower, resource_usages
from tk_ep import EPTimeoutError
from tk_ep.all_gather import GatherRequest, Sessions, SessionSizes, gathered_bytes
from tk_ep.handle import Place
from tk_ep.pipeline import SlotSizes, neighbours
from tk_ep.sizes import FLAG_BYTES, MAX_RANKS, MAX_SLOTS, with_flags
from tk_ep.symmetric import memory
from tk_ep.symmetric.copies import SymmetricGathering, SymmetricPipes
from tk_ep.symmetric.exchange import GIVEN_UP, NOBODY, PREPARED, Step
from tk_ep.symmetric.rank import Rank

from .copying import DTYPES, numbers
from .launches import check_arguments

SM_90A = arch_from_name("sm_90a")
CASES_OF_RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])


class _EmulatedRank(Rank):
    """On a CPU: what must have come has come, as ranks take their steps in turn."""

    def exchange(self) -> Callable[[Step], None]:
        def take(step: Step) -> None:
            words = [each.view(-1) for each in self._buffers]
            own, peers = words[self.place.rank], range(step.first_peer, step.first_peer + step.num_peers)
            count = int(own[step.epoch])
            for peer in set(peers) - {self.place.rank}:
                found, wanted = int(own[step.awaited + peer]), count + step.ahead
                if not own[memory.FAILED] and found < wanted:
                    own[memory.FAILED] = 1
                    self._failure[:5] = torch.tensor([1, step.op, peer, wanted, found])
            failed = bool(own[memory.FAILED])
            if step.told != NOBODY and (failed or step.told_ahead != NOBODY):
                for peer in peers:
                    words[peer][step.told + self.place.rank] = count + (-GIVEN_UP if failed else step.told_ahead)
            if step.prepared != NOBODY:
                values = count + step.prepared_ahead + torch.arange(PREPARED)
                own[step.prepared :][:PREPARED] = count - GIVEN_UP if failed else values
            own[step.epoch] += 0 if failed else step.advance

        return take


def virtual_ranks(num_ranks: int, num_bytes: int, device: str, timeout_secs: float = 20.0) -> list[Rank]:
    """Ranks with room for num_bytes beside the flags, on one device."""
    place = Place(object(), 0, num_ranks, torch.empty(0, device=device).device)
    total = with_flags(num_bytes)
    shape = memory.allocated_units(total), 4
    buffers = tuple(torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_ranks))
    kind = _EmulatedRank if device == "cpu" else Rank
    return [kind(place._replace(rank=rank), buffers, total, 24, timeout_secs) for rank in range(num_ranks)]


def has_failed(rank: Rank, match: str) -> None:
    """The rank has waited in vain."""
    if rank.place.device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(EPTimeoutError, match=match):
        rank.check()


def sessions_of(ranks: list[Rank], num_bytes: int, most: int = 9) -> list[Sessions]:
    sizes = SessionSizes(num_bytes, most)
    return [Sessions(each.place, sizes, SymmetricGathering(each, num_bytes)) for each in ranks]


def gather(sessions: list[Sessions], tensors: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[Callable]]:
    """All ranks gather their tensors: what each gets, and its function that waits."""
    requests = [GatherRequest(each) for each in tensors]
    pairs = [one.gather(request, one.places(request)) for one, request in zip(sessions, requests)]
    return [gathered for gathered, _ in pairs], [wait for _, wait in pairs]


@CASES_OF_RANKS
def test_gathers(num_ranks: int, device: str) -> None:
    """Sessions of several gathers, waited for in any order or not at all; tensors in place, and without elements."""
    shapes = [(3, 5), (), (0, 7), (129,)]
    count = sum(gathered_bytes(num_ranks, [8 * 15, 8, 0, 8 * 129]) for _ in DTYPES)
    sessions = sessions_of(virtual_ranks(num_ranks, count, device), count)
    for seed in range(3):
        for each in sessions:
            each.begin(is_captured=False)
        kept = []
        for number, dtype in enumerate(DTYPES):
            seeds = [97 * seed + 7 * rank + number for rank in range(num_ranks)]
            tensors = [[numbers(one, shape, dtype).to(device) for shape in shapes] for one in seeds]
            wanted = [torch.stack(each) for each in zip(*tensors)]
            if (seed + number) % 2:
                for rank, each in enumerate(sessions):
                    in_place = each.new(shapes, dtype)
                    for to, t in zip(in_place, tensors[rank]):
                        to.copy_(t)
                    tensors[rank] = in_place
            kept.append((*gather(sessions, tensors), wanted))
        order = reversed(kept) if seed else kept[:-1]
        for wait in [wait for _, waits, _ in order for wait in (*waits, *waits)]:
            wait()
        for each in sessions:
            each.end()
        for gathered, waits, wanted in kept:
            for mine, wait in zip(gathered, waits):
                assert_equal(mine, wanted)
                wait()


def test_more_gathers_than_are_prepared(device: str) -> None:
    """In two sessions, of which the second begins where the first ended; one is waited for, all have arrived."""
    sessions = sessions_of(virtual_ranks(2, 128 * 70, device), 128 * 70, 70)
    for first in (0, 1000):
        for each in sessions:
            each.begin(is_captured=False)
        kept = []
        for number in range(first, first + 70):
            kept.append(gather(sessions, [[torch.tensor(2 * number + rank, device=device)] for rank in range(2)]))
        for wait in kept[-1][1]:
            wait()
        for number, (gathered, _) in enumerate(kept, first):
            assert [each[0].tolist() for each in gathered] == [[2 * number, 2 * number + 1]] * 2
        for each in sessions:
            each.end()


def test_a_gather_without_a_rank(device: str) -> None:
    """It ends at the limit. A rank that comes back does not take what was written over for its own."""
    ranks = virtual_ranks(2, 256, device, timeout_secs=0.05)
    sessions = sessions_of(ranks, 256)
    x = torch.arange(4, device=device)
    for each in sessions:
        each.begin(is_captured=False)
    gathered, waits = gather(sessions, [[x], [x + 4]])
    waits[1]()
    sessions[0].end()
    assert_equal(gathered[1][0], torch.stack((x, x + 4)))
    # Rank 1 still reads, while rank 0 begins the next session, and waits in vain.
    sessions[0].begin(is_captured=False)
    request = GatherRequest([x + 8])
    sessions[0].gather(request, sessions[0].places(request))
    has_failed(ranks[0], "all_gather: rank 0 waited 0.05 s for rank 1, which is 1 calls behind")
    sessions[1].end()
    has_failed(ranks[1], "all_gather: rank 1 waited 0.05 s for rank 0, which has given up itself")
    for each in sessions:
        with pytest.raises(EPTimeoutError):
            each.end()


def pipes_of(ranks: list[Rank], sizes: SlotSizes) -> list[SymmetricPipes]:
    return [SymmetricPipes(each, sizes) for each in ranks]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_sends(num_ranks: int, device: str) -> None:
    """Both ways round the ring: slots are used again, sizes change, and all send before they receive."""
    sizes = SlotSizes(520, 3)
    ranks = virtual_ranks(num_ranks, sizes.num_bytes, device)
    pipes = pipes_of(ranks, sizes)
    ways = [(rank, to) for rank in range(num_ranks) for to in neighbours(rank, num_ranks)]
    for first in range(0, 12, 2):
        sent = {}
        for number, (rank, to) in product((first, first + 1), ways):
            shape, dtype = [(5, 13), (0,), (), (3,)][number % 4], DTYPES[number % 3]
            sent[number, rank, to] = numbers(100 * number + 10 * rank + to, shape, dtype).to(device)
            copy = sent[number, rank, to].clone()
            pipes[rank].send(copy, to)
            copy.zero_()
        for (_, rank, to), wanted in sent.items():
            got = torch.empty_like(wanted)
            pipes[to].receive(got, rank)
            assert_equal(got, wanted)
    for rank in ranks:
        rank.check()


def test_a_send_that_is_not_received(device: str) -> None:
    """It ends at the limit, and a receiver that comes back does not get what came after."""
    sizes = SlotSizes(64, 2)
    ranks = virtual_ranks(3, sizes.num_bytes, device, timeout_secs=0.05)
    pipes = pipes_of(ranks, sizes)
    x = torch.arange(8, device=device)
    for number in range(3):
        pipes[2].send(x + number, 1)
    has_failed(ranks[2], "pp_send: rank 2 waited 0.05 s for rank 1, which is 1 calls behind")
    got = torch.zeros_like(x)
    pipes[1].receive(got, 2)
    has_failed(ranks[1], "pp_recv: rank 1 waited 0.05 s for rank 2, which has given up itself")
    ranks[0].check()


def test_a_slot_that_is_written_over_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver looks at the flag again."""
    sizes = SlotSizes(64, 1)
    ranks = virtual_ranks(2, sizes.num_bytes, "cpu")
    pipes = pipes_of(ranks, sizes)
    x = torch.arange(8)
    pipes[0].send(x, 1)
    find = pipes[1]._bytes_of_slot

    def while_reading(*args: Any) -> Tensor:
        pipes[0].send(x + 1, 1)
        return find(*args)

    monkeypatch.setattr(pipes[1], "_bytes_of_slot", while_reading)
    pipes[1].receive(torch.zeros_like(x), 0)
    has_failed(ranks[1], "pp_recv: rank 1 waited 20 s for rank 0, which has given up itself")


def test_flags_of_slots_fit() -> None:
    assert memory.flag_of_slot(MAX_SLOTS, memory.FILLED) <= FLAG_BYTES // 4
    words = {memory.flag_of_slot(slot, kind) for slot in range(MAX_SLOTS) for kind in range(4)}
    assert len(words) == 4 * MAX_SLOTS
    assert min(words) > memory.FAILED
    assert all(word % MAX_RANKS == 0 for word in words)


# ---- kernels


@pytest.mark.compile
def test_compile() -> None:
    """Without local memory: up to the largest number of ranks, rows of one vector and of many."""
    with capture(SM_90A), recorded_launches() as recorded:
        for num_ranks, hidden in ((1, 8), (2, 512), (8, 7168)):
            rank = virtual_ranks(num_ranks, 1 << 20, "meta")[0]
            rank.exchange()(Step(memory.GATHER, 0, num_ranks, 0, 0, 0))
            rows = torch.empty((9, hidden), dtype=torch.bfloat16, device="meta")
            rank.fetch(rows, torch.empty((5, 3), dtype=torch.int32, device="meta"))
    arguments = dict(recorded.launches)
    assert len(arguments) == 6
    lowered = [lower(each.kernel, *each.args, simplified=False) for each in arguments]
    for (request, args), usage in zip(arguments.items(), resource_usages(list(arguments), lowered)):
        for used in usage.values():
            assert used.stack_bytes == 0, f"{request}: registers were spilled"
        check_arguments(request, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 8), (9, 48), (300, 1096)])
@CASES_OF_RANKS
def test_fetches(num_ranks: int, num_rows: int, hidden: int) -> None:
    """Entries of all ranks; indices of none; no indices; more vectors than the thread blocks take at once."""
    ranks = virtual_ranks(num_ranks, num_rows * hidden * 2, "cuda")
    table = torch.randn((num_ranks * num_rows, hidden), device="cuda").bfloat16()
    stored = []
    for rank, own in zip(ranks, table.chunk(num_ranks)):
        stored.append(rank.data(rank.place.rank)[: own.nbytes].view(torch.bfloat16).view(own.shape))
        stored[-1].copy_(own)
    indices = torch.randint(-2, len(table) + 2, (701, 3), device="cuda").int()
    indices[0] = torch.tensor([-(2**31), 2**31 - 1, len(table) - 1])
    is_entry = (indices >= 0) & (indices < len(table))
    wanted = (table[indices.clamp(0, len(table) - 1).long()] * is_entry[..., None]).flatten(0, 1)
    for rank, rows in zip(ranks, stored):
        with poisoned_allocations():
            assert_equal(rank.fetch(rows, indices), torch.where(is_entry.flatten()[:, None], wanted, 0))
            assert rank.fetch(rows, indices[:0]).shape == (0, hidden)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """Replays of a session, of sends and of a fetch, in turn with eager calls."""
    sizes = SlotSizes(4096, 3)
    gathering, sending = virtual_ranks(2, 1 << 20, "cuda"), virtual_ranks(2, sizes.num_bytes, "cuda")
    sessions, pipes = sessions_of(gathering, 4096), pipes_of(sending, sizes)
    x = [torch.zeros(256, device="cuda") for _ in range(2)]

    def call() -> list[Tensor]:
        for each in sessions:
            each.begin(is_captured=False)
        results, waits = gather(sessions, [[each] for each in x])
        again, others = gather(sessions, [[each + 1] for each in x])
        for wait in (*waits, *others):
            wait()
        kept = [each.clone() for each in (*results[0], *results[1], *again[0], *again[1])]
        for each in sessions:
            each.end()
        for rank in range(2):
            pipes[rank].send(x[rank], 1 - rank)
            pipes[rank].send(x[rank] + 2, 1 - rank)
        for rank in (0, 0, 1, 1):
            kept.append(torch.empty_like(x[0]))
            pipes[rank].receive(kept[-1], 1 - rank)
        return kept

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for number in range(12):
        for rank in range(2):
            x[rank].fill_(10 * number + rank)
        results = captured
        if number % 3 == 2:
            results = call()
        else:
            graph.replay()
        both = torch.stack(x)
        wanted = [both, both, both + 1, both + 1, x[1], x[1] + 2, x[0], x[0] + 2]
        assert_equal(results, wanted)
    for rank in (*gathering, *sending):
        rank.check()
