"""What context parallelism calls: the ranks' tensors are gathered in memory of the backend.

In a session results lie there one after the other, each as (R, …):

    rank 0's t₀, rank 1's t₀, … │ rank 0's t₁, rank 1's t₁, … │ …
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tk_core import check
from tk_core.math import align
from tk_ep.consensus import waiting_for_peers
from tk_ep.handle import Place

_ALIGNMENT = 128
Shape = Sequence[int]


def check_shapes(shapes: Any, dtype: Any) -> list[tuple[int, ...]]:
    """One shape, or a sequence of them, as a list. Raises TypeError or ValueError."""
    check.require_type(isinstance(dtype, torch.dtype), "dtype", "a torch.dtype", dtype)
    check.require_type(isinstance(shapes, tuple | list), "shapes", "a shape or a sequence of shapes", shapes)
    several = [shapes] if all(isinstance(each, int) for each in shapes) else shapes
    for index, shape in enumerate(several):
        check.require_type(isinstance(shape, tuple | list), f"shapes[{index}]", "a shape", shape)
        for size in shape:
            check.in_range(f"shapes[{index}]", size, 0, 2**62)
    return [tuple(each) for each in several]


def gathered_bytes(num_ranks: int, tensor_bytes: Iterable[int]) -> int:
    """Bytes of a session that tensors of these sizes take, with those of all ranks."""
    return sum(align(num_ranks * each, _ALIGNMENT) for each in tensor_bytes)


class SessionSizes(NamedTuple):
    """The most that a session takes."""

    num_max_session_bytes: int
    num_max_all_gathers_per_session: int

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return self._asdict()


class GatherRequest(NamedTuple):
    """The checked tensors of one all_gather."""

    tensors: list[Tensor]

    def facts(self) -> dict[str, int]:
        """What has to be equal on all ranks."""
        return {"number of tensors": len(self.tensors), "bytes of tensors": sum(each.nbytes for each in self.tensors)}


class Gathering(Protocol):
    """Moves what sessions gather. The gathers of a session are numbered from 0."""

    memory: Tensor
    """uint8: where each session's results lie, from the start on"""

    def gather(self, number: int, places: list[Tensor]) -> None:
        """Begin to gather in places, uint8 (R, bytes) of the memory, where this rank's part is already."""
        ...

    def wait(self, number: int) -> None:
        """Wait until what all ranks gather has arrived. It may be called again."""
        ...

    def end(self, count: int) -> None:
        """Wait for all of a session's gathers, and let peers write over them when the stream comes here."""
        ...


class CollectiveGathering:
    """Gathers by `all_gather_into_tensor` of the group."""

    def __init__(self, place: Place, num_bytes: int, limit: timedelta) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
        self._place = place
        self._limit = limit
        # By the number of a gather those that were not waited for.
        self._works: dict[int, list[dist.Work]] = {}

    def gather(self, number: int, places: list[Tensor]) -> None:
        """See Gathering."""
        works = self._works[number] = []
        with waiting_for_peers("all_gather", self._place.rank, self._limit):
            for place in places:
                own, options = place[self._place.rank], {"group": self._place.group, "async_op": True}
                works += [dist.all_gather_into_tensor(place.flatten(), own, **options)] if len(own) else []

    def wait(self, number: int) -> None:
        """See Gathering."""
        with waiting_for_peers("all_gather", self._place.rank, self._limit):
            for work in self._works.pop(number, ()):
                work.wait(self._limit)

    def end(self, count: int) -> None:
        """See Gathering."""
        for number in range(count):
            self.wait(number)


class Sessions:
    """A rank's sessions, which use the same memory one after the other."""

    def __init__(self, place: Place, sizes: SessionSizes, gathering: Gathering) -> None:
        self.is_open = False
        self._place = place
        self._sizes = sizes
        self._gathering = gathering
        self._begun = 0

    def begin(self, is_captured: bool) -> None:
        """Begin a session, in a CUDA graph or not: all memory is free."""
        self.is_open, self.is_captured = True, is_captured
        self._begun += 1
        self._used = self._count = 0
        # Where tensors of `new` are gathered, uint8 (R, bytes), by the address of this rank's.
        self._in_place: dict[int, Tensor] = {}

    def end(self) -> None:
        """End the session, when all has arrived."""
        self._gathering.end(self._count)
        self.is_open = False

    def new(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors that will be gathered where they are. Raises ValueError, and takes nothing, if there is no room."""
        places = self._take([prod(shape) * dtype.itemsize for shape in shapes])
        own = [_typed(place, dtype, shape)[self._place.rank] for place, shape in zip(places, shapes)]
        self._in_place |= {t.data_ptr(): place for t, place in zip(own, places)}
        return own

    def places(self, request: GatherRequest) -> list[Tensor]:
        """Where the tensors are gathered, uint8 (R, bytes) each.

        Raises ValueError, and takes nothing, if there is no room.
        """
        most, count = self._sizes.num_max_all_gathers_per_session, self._count + 1
        check.require(count <= most, "num_max_all_gathers_per_session", "at least {}", most, count)
        found = [self._in_place.get(t.data_ptr()) for t in request.tensors]
        is_new = [place is None or place[0].nbytes != t.nbytes for t, place in zip(request.tensors, found)]
        taken = iter(self._take([t.nbytes for t, new in zip(request.tensors, is_new) if new]))
        return [next(taken) if new else place for place, new in zip(found, is_new)]

    def gather(self, request: GatherRequest, places: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Results (R, …), and a function that waits for them, which does nothing after the session."""
        for t, place in zip(request.tensors, places):
            own = place[self._place.rank]
            if own.data_ptr() != t.data_ptr():
                own.copy_(t.flatten().view(torch.uint8))
        number, session = self._count, self._begun
        self._count += 1
        self._gathering.gather(number, places)

        def wait() -> None:
            if self.is_open and self._begun == session:
                self._gathering.wait(number)

        return [_typed(place, t.dtype, t.shape) for place, t in zip(places, request.tensors)], wait

    def _take(self, tensor_bytes: list[int]) -> list[Tensor]:
        """Room for the tensors of all ranks, uint8 (R, bytes) each."""
        num_ranks, memory = self._place.num_ranks, self._gathering.memory
        needed = self._used + gathered_bytes(num_ranks, tensor_bytes)
        check.require(needed <= len(memory), "num_max_session_bytes", "at least {}", len(memory), needed)
        places = []
        for size in tensor_bytes:
            places.append(memory[self._used :][: num_ranks * size].view(num_ranks, size))
            self._used += gathered_bytes(num_ranks, [size])
        return places


def _typed(place: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    """Bytes (R, bytes) as a tensor (R, …) of this dtype."""
    return place.flatten().view(dtype).view(len(place), *shape)
