"""all_gather, pp_send and pp_recv: copy engines write to peers' memory, between steps in which a warp waits and tells.

    all_gather   wait for credits, copy to all peers and tell each           wait: for all ranks' copies
                 end of a session: wait for all of its gathers, give credits
    pp_send      wait until the slot is free, copy to it, tell               pp_recv: wait, copy from it, free it

A copy engine tells of a gather, too: behind the data it copies a word with the flag's value, which the first step of a
session has prepared. What one stream copies to a peer arrives in this order, so no warp has to see that data is there.

After a time-out copies are made all the same, as nothing can keep a copy engine from it. So before a rank writes over
what a late one may not have read, it takes back what it told of it, and the late rank fails, too: a reader looks at
the flags again when it has read.
"""

import torch
from torch import Tensor

from tk_ep.pipeline import SlotSizes, neighbours
from tk_ep.symmetric import memory
from tk_ep.symmetric.exchange import PREPARED, Step
from tk_ep.symmetric.rank import Rank


class SymmetricGathering:
    """See tk_ep.all_gather.Gathering. Flags count the gathers of all sessions."""

    def __init__(self, rank: Rank, num_bytes: int) -> None:
        self._place = rank.place
        self._check, self._exchange = rank.check, rank.exchange()
        self._data = [rank.data(each)[:num_bytes] for each in range(rank.place.num_ranks)]
        self.memory = self._data[rank.place.rank]
        everybody = memory.GATHER, 0, rank.place.num_ranks, memory.EPOCH + memory.GATHER
        arrived, credit = (memory.flag_of(kind, memory.GATHER) for kind in (memory.ARRIVED, memory.CREDIT))
        self._enter = Step(*everybody, awaited=credit, ahead=0, told=arrived, prepared=memory.PREPARED)
        flag = arrived + rank.place.rank
        self._flags = [rank.words(each)[flag : flag + 1] for each in range(rank.place.num_ranks)]
        self._prepared = rank.words(rank.place.rank)[memory.PREPARED :][:PREPARED]
        self._wait = Step(*everybody, awaited=arrived, ahead=0)
        self._credit = Step(*everybody, awaited=arrived, ahead=0, told=credit)

    def gather(self, number: int, places: list[Tensor]) -> None:
        """See Gathering. Each rank begins with the next one, so that a rank gets one copy at a time."""
        self._check()
        rank, num_ranks = self._place.rank, self._place.num_ranks
        if number % PREPARED == 0:
            self._exchange(self._enter._replace(prepared_ahead=number + 1))
        for to in (*range(rank + 1, num_ranks), *range(rank)):
            for place in places:
                own = place[rank]
                start = own.storage_offset() - self.memory.storage_offset()
                self._data[to][start : start + own.numel()].copy_(own)
            self._flags[to].copy_(self._prepared[number % PREPARED :][:1])

    def wait(self, number: int) -> None:
        """See Gathering."""
        self._exchange(self._wait._replace(ahead=number + 1))

    def end(self, count: int) -> None:
        """See Gathering."""
        self._check()
        self._exchange(self._credit._replace(ahead=count, told_ahead=count, advance=count))


class SymmetricPipes:
    """See tk_ep.pipeline.Pipes. A rank's buffer has the slots of what its neighbours send.

    Which slot is next is known on the host, where a CUDA graph has its slots for good: each has flags of its own.
    """

    def __init__(self, rank: Rank, sizes: SlotSizes) -> None:
        self._rank, self._num_ranks = rank.place.rank, rank.place.num_ranks
        self._sizes = sizes
        self._check, self._exchange = rank.check, rank.exchange()
        self._data = [rank.data(each) for each in range(self._num_ranks)]
        self._sent, self._received = [0] * self._num_ranks, [0] * self._num_ranks

    def send(self, t: Tensor, to: int) -> None:
        """See Pipes."""
        self._check()
        slot = self._next(self._sent, to)
        sent, filled, freed = (memory.flag_of_slot(slot, kind) for kind in (memory.SENT, memory.FILLED, memory.FREED))
        step = Step(memory.SEND, to, 1, sent + to, awaited=freed, ahead=0, told=filled)
        self._exchange(step)
        if t.numel():
            self._bytes_of_slot(to, self._rank, slot, t.nbytes).copy_(_bytes(t))
        self._exchange(step._replace(told_ahead=1, advance=1))

    def receive(self, t: Tensor, source: int) -> None:
        """See Pipes."""
        self._check()
        slot = self._next(self._received, source)
        kinds = memory.RECEIVED, memory.FILLED, memory.FREED
        received, filled, freed = (memory.flag_of_slot(slot, kind) for kind in kinds)
        step = Step(memory.RECEIVE, source, 1, received + source, awaited=filled, ahead=1, told=freed)
        self._exchange(step)
        if t.numel():
            _bytes(t).copy_(self._bytes_of_slot(self._rank, source, slot, t.nbytes))
        self._exchange(step._replace(told_ahead=1, advance=1))

    def _next(self, counts: list[int], rank: int) -> int:
        slot = counts[rank] % self._sizes.num_max_inflight_tensors
        counts[rank] += 1
        return slot

    def _bytes_of_slot(self, at: int, source: int, slot: int, num_bytes: int) -> Tensor:
        """The first bytes of a slot in the buffer of rank `at`, for what `source` sends there."""
        index = neighbours(at, self._num_ranks).index(source) * self._sizes.num_max_inflight_tensors + slot
        start = index * self._sizes.slot_bytes
        return self._data[at][start : start + num_bytes]


def _bytes(t: Tensor) -> Tensor:
    return t.flatten().view(torch.uint8)
