"""What pipeline parallelism calls: tensors to and from the neighbours in a ring of ranks.

There are slots for each neighbour, so that a sender need not wait for the receiver until all of them are in flight.
"""

import secrets
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from tk_core import check
from tk_core.math import align
from tk_ep.consensus import gather, waiting_for_peers
from tk_ep.handle import Place

_ALIGNMENT = 128
_SENDER, _RECEIVER = 0, 1


class SlotSizes(NamedTuple):
    """How many tensors may be on their way to a neighbour, at most MAX_SLOTS, and how large they are."""

    num_max_tensor_bytes: int
    num_max_inflight_tensors: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return align(self.num_max_tensor_bytes, _ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots for both neighbours."""
        return 2 * self.num_max_inflight_tensors * self.slot_bytes

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return self._asdict()


def neighbours(rank: int, num_ranks: int) -> list[int]:
    """The ranks before and after one in the ring: of two ranks the other, of one none."""
    return sorted({(rank + step) % num_ranks for step in (-1, 1)} - {rank})


def check_message(place: Place, sizes: SlotSizes, name: str, rank: Any, t: Any) -> None:
    """Raise TypeError or ValueError unless t fits a slot, and `rank`, the argument of this name, is a neighbour."""
    check.integer(name, rank)
    found = neighbours(place.rank, place.num_ranks)
    check.require(rank in found, name, "a neighbour in the ring of ranks, of {}", rank, found)
    check.plain("t", t)
    check.tensor("t", t, (t.dtype,), (...,), device=place.device)
    most = sizes.num_max_tensor_bytes
    check.require(t.nbytes <= most, "t", "at most num_max_tensor_bytes = {} bytes", t.nbytes, most)


class Pipes(Protocol):
    """A rank's sends to its neighbours, and receives from them: contiguous tensors that fit a slot."""

    def send(self, t: Tensor, to: int) -> None:
        """Send t when a slot is free. When the stream comes here, t may change."""
        ...

    def receive(self, t: Tensor, source: int) -> None:
        """Receive in t what `source` sends next."""
        ...


class _Sent:
    """The slots for one neighbour, of which sends take the next in turn."""

    def __init__(self, sizes: SlotSizes, device: torch.device) -> None:
        shape = sizes.num_max_inflight_tensors, sizes.slot_bytes
        self.slots = torch.empty(shape, dtype=torch.uint8, device=device)
        self.works: list[dist.Work | None] = [None] * len(self.slots)
        self.next = 0


class CollectivePipes:
    """Slots at the sender, and NCCL or gloo. Making one is collective.

    Each direction between two ranks has a communicator of its own: NCCL runs what one communicator is given in order,
    so that two ranks which send to each other, and then receive, would wait for each other.
    """

    def __init__(self, place: Place, sizes: SlotSizes, limit: timedelta) -> None:
        self._place = place
        self._limit = limit
        found = neighbours(place.rank, place.num_ranks)
        self._sent = {rank: _Sent(sizes, place.device) for rank in found}
        # Not groups of dist.new_group: it names them by a count that has to be equal on all ranks of the world.
        key = int(gather(place, "pp_set_config", torch.tensor([secrets.randbits(62)]), limit)[0])
        self._pairs: dict[tuple[int, int], Any] = {}
        kind = dist.ProcessGroupGloo if place.device.type == "cpu" else dist.ProcessGroupNCCL
        # Both ranks of a pair wait for each other here, so all ranks take pairs in the same order. A byte is sent, as
        # NCCL's first send would wait for its receiver.
        byte = torch.zeros(1, dtype=torch.uint8, device=place.device)
        for low, high in sorted(tuple(sorted((place.rank, rank))) for rank in found):
            for source, to in ((low, high), (high, low)):
                store = dist.PrefixStore(f"tk_ep/{key}/{source}-{to}", _get_default_store())
                with waiting_for_peers("pp_set_config", place.rank, limit):
                    pair = kind(store, _RECEIVER if place.rank == to else _SENDER, 2, limit)
                    work = pair.recv([byte], _SENDER, 0) if place.rank == to else pair.send([byte], _RECEIVER, 0)
                    work.wait(limit)
                self._pairs[source, to] = pair

    def send(self, t: Tensor, to: int) -> None:
        """See Pipes."""
        sent = self._sent[to]
        slot = sent.slots[sent.next][: t.nbytes]
        with waiting_for_peers("pp_send", self._place.rank, self._limit):
            if sent.works[sent.next] is not None:
                sent.works[sent.next].wait(self._limit)
            slot.copy_(t.flatten().view(torch.uint8))
            pair = self._pairs[self._place.rank, to]
            sent.works[sent.next] = pair.send([slot], _RECEIVER, 0) if len(slot) else None
        sent.next = (sent.next + 1) % len(sent.works)

    def receive(self, t: Tensor, source: int) -> None:
        """See Pipes."""
        if t.numel():
            with waiting_for_peers("pp_recv", self._place.rank, self._limit):
                pair = self._pairs[source, self._place.rank]
                pair.recv([t.flatten().view(torch.uint8)], _SENDER, 0).wait(self._limit)
