"""The symmetric backend: kernels of a host's GPUs that read and write each other's memory."""

import hashlib
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_ep.check import CombineRequest, CombineResult, DispatchRequest, DispatchResult
from tk_ep.consensus import gather
from tk_ep.engram import FetchRequest, Storage, fetched_factors
from tk_ep.handle import Place
from tk_ep.pipeline import SlotSizes
from tk_ep.sizes import MAX_RANKS
from tk_ep.symmetric.copies import SymmetricGathering, SymmetricPipes
from tk_ep.symmetric.memory import allocated_units
from tk_ep.symmetric.rank import MAX_BYTES, Rank


class Obstacle(NamedTuple):
    """Why the backend cannot serve a group."""

    reason: str
    ranks: tuple[int, int]


def find_obstacle(place: Place, hosts: list[int], limit: timedelta) -> Obstacle | None:
    """The first pair of ranks that keeps a group from this backend, the same on all ranks; None without any.

    `hosts` has a number for each rank's host. Collective.
    """
    last = place.num_ranks - 1
    if place.device.type != "cuda":
        return Obstacle("it needs GPUs", (0, last))
    if place.num_ranks > MAX_RANKS:
        return Obstacle(f"it serves at most {MAX_RANKS} ranks", (0, last))
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            return Obstacle("ranks are on different hosts", (0, rank))
    visible = [_gpu_id(index) for index in range(torch.cuda.device_count())]
    own = visible[place.device.index]
    gpus = gather(place, "ElasticBuffer", torch.tensor([own]), limit)[:, 0].tolist()
    # Which ranks this one can reach; a GPU that is hidden from this process is assumed to be.
    reached = torch.full((place.num_ranks,), get_arch(place.device).has_tma)
    for rank, gpu in enumerate(gpus):
        if rank != place.rank and gpu in visible:
            there = visible.index(gpu)
            reached[rank] &= gpu != own and torch.cuda.can_device_access_peer(place.device.index, there)
    unreached = (~gather(place, "ElasticBuffer", reached, limit)).nonzero().tolist()
    if not unreached:
        return None
    return Obstacle("GPUs are before sm_90, shared, or do not reach each other's memory", tuple(unreached[0]))


def _gpu_id(index: int) -> int:
    """A number that names a GPU in all processes, of 63 bits."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:8], "little") >> 1


class SymmetricBackend:
    """Serves a buffer by `Rank`, in memory that all ranks map. Making one is collective.

    Args:
        place: of this rank.
        num_bytes: of the buffer.
        num_sms: thread blocks that send, where a call does not say.
        gpu_timeout_secs: how long a kernel waits for other ranks.
        limit: how long the host waits for its own GPU.
    """

    name = "symmetric"
    supports_capture = True

    def __init__(self, place: Place, num_bytes: int, num_sms: int, gpu_timeout_secs: float, limit: timedelta) -> None:
        check.require(num_bytes < MAX_BYTES, "num_bytes", "fewer than {} bytes", num_bytes, MAX_BYTES)
        self._place = place
        self._limit = limit.total_seconds()
        shape, self._memory = (allocated_units(num_bytes), 4), None
        buffers: tuple[Tensor, ...]
        if place.num_ranks == 1:
            buffers = (torch.zeros(shape, dtype=torch.int32, device=place.device),)
        else:
            import torch.distributed._symmetric_memory as symmetric_memory

            own = symmetric_memory.empty(*shape, dtype=torch.int32, device=place.device).zero_()
            torch.cuda.synchronize(place.device)
            self._memory = symmetric_memory.rendezvous(own, place.group)
            buffers = tuple(
                own if rank == place.rank else self._memory.get_buffer(rank, shape, torch.int32)
                for rank in range(place.num_ranks)
            )
            # Nobody writes before all have zeroed.
            gather(place, "ElasticBuffer", torch.zeros(1), limit)
        beside = torch.cuda.Stream(place.device)
        self._rank: Rank | None = Rank(place, buffers, num_bytes, num_sms, gpu_timeout_secs, beside)

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """See `tk_ep.backend.Backend`."""
        self._rank.check()
        call = self._rank.push_tokens(request)
        self._rank.count(call, self._limit)
        return self._rank.receive(call)

    def combine(self, request: CombineRequest) -> CombineResult:
        """See `tk_ep.backend.Backend`."""
        self._rank.check()
        call = self._rank.push_rows(request)
        self._rank.wait(call)
        if request.previous_event_before_epilogue is not None:
            request.previous_event_before_epilogue.current_stream_wait()
        return self._rank.sum(call)

    def gathering(self, num_bytes: int) -> SymmetricGathering:
        """See `tk_ep.backend.Backend`."""
        return SymmetricGathering(self._rank, num_bytes)

    def pipes(self, sizes: SlotSizes) -> SymmetricPipes:
        """See `tk_ep.backend.Backend`."""
        return SymmetricPipes(self._rank, sizes)

    def store(self, storage: Storage) -> Storage:
        """See `tk_ep.backend.Backend`."""
        rows = self._rank.data(self._place.rank)[: storage.rows.nbytes].view(storage.rows.dtype)
        # Peers may still fetch from what was stored before.
        self.barrier(with_cpu_sync=True)
        stored = storage.copied_to(rows.view(storage.rows.shape))
        self._rank.barrier()
        return stored

    def fetch(self, storage: Storage, request: FetchRequest) -> tuple[Tensor, Tensor | None]:
        """See `tk_ep.backend.Backend`. Peers have no part in it."""
        return request.joined(self._rank.fetch(storage.rows, request.indices)), fetched_factors(storage, request)

    def barrier(self, with_cpu_sync: bool) -> None:
        """See `tk_ep.backend.Backend`."""
        self._rank.check()
        self._rank.barrier()
        if with_cpu_sync:
            self._rank.wait_on_host("barrier", self._limit)

    def check(self) -> None:
        """See `tk_ep.backend.Backend`."""
        self._rank.check()

    def release(self) -> None:
        """See `tk_ep.backend.Backend`. Peers that have mapped the memory keep it."""
        self._rank = self._memory = None
