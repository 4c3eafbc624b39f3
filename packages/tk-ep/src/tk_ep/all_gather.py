"""What context parallelism calls, over the group's collectives: the ranks' tensors are gathered in a buffer's memory.

In a session results lie there one after the other, each as (R, …):

    rank 0's t₀, rank 1's t₀, … │ rank 0's t₁, rank 1's t₁, … │ …
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

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


class Sessions:
    """A rank's sessions, which use the same memory one after the other."""

    def __init__(self, place: Place, sizes: SessionSizes, limit: timedelta) -> None:
        self.is_open = False
        self._place = place
        self._sizes = sizes
        self._limit = limit
        self._memory = torch.empty(sizes.num_max_session_bytes, dtype=torch.uint8, device=place.device)

    def begin(self) -> None:
        """Begin a session: all memory is free."""
        self.is_open = True
        self._used = 0
        # The works of each all_gather: those that were not waited for.
        self._works: list[list[dist.Work]] = []
        # Where tensors of `new` are gathered, uint8 (R, bytes), by the address of this rank's.
        self._in_place: dict[int, Tensor] = {}

    def end(self) -> None:
        """End the session, when all has arrived."""
        for works in self._works:
            self.wait(works)
        self.is_open = False

    def new(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors that will be gathered where they are. Raises ValueError, and takes nothing, if there is no room."""
        places = self._take([prod(shape) * dtype.itemsize for shape in shapes])
        own = [_typed(place, dtype, shape)[self._place.rank] for place, shape in zip(places, shapes)]
        self._in_place |= {t.data_ptr(): place for t, place in zip(own, places)}
        return own

    def places(self, request: GatherRequest) -> list[Tensor]:
        """Where the tensors are gathered, uint8 (R, bytes) each, with this rank's in place.

        Raises ValueError, and takes nothing, if there is no room.
        """
        most, count = self._sizes.num_max_all_gathers_per_session, len(self._works) + 1
        check.require(count <= most, "num_max_all_gathers_per_session", "at least {}", most, count)
        found = [self._in_place.get(t.data_ptr()) for t in request.tensors]
        is_new = [place is None or place[0].nbytes != t.nbytes for t, place in zip(request.tensors, found)]
        taken = iter(self._take([t.nbytes for t, new in zip(request.tensors, is_new) if new]))
        for index, t in enumerate(request.tensors):
            if is_new[index]:
                found[index] = next(taken)
                found[index][self._place.rank].copy_(t.flatten().view(torch.uint8))
        return found

    def gather(self, request: GatherRequest, places: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Results (R, …), and works for `wait`."""
        works = []
        self._works.append(works)
        with waiting_for_peers("all_gather", self._place.rank, self._limit):
            for place in places:
                own, options = place[self._place.rank], {"group": self._place.group, "async_op": True}
                works += [dist.all_gather_into_tensor(place.flatten(), own, **options)] if len(own) else []
        return [_typed(place, t.dtype, t.shape) for place, t in zip(places, request.tensors)], works

    def wait(self, works: list[dist.Work]) -> None:
        """Wait for the works, and forget them."""
        with waiting_for_peers("all_gather", self._place.rank, self._limit):
            while works:
                works.pop().wait(self._limit)

    def _take(self, tensor_bytes: list[int]) -> list[Tensor]:
        """Room for the tensors of all ranks, uint8 (R, bytes) each."""
        num_ranks = self._place.num_ranks
        needed = self._used + gathered_bytes(num_ranks, tensor_bytes)
        check.require(needed <= len(self._memory), "num_max_session_bytes", "at least {}", len(self._memory), needed)
        places = []
        for size in tensor_bytes:
            places.append(self._memory[self._used :][: num_ranks * size].view(num_ranks, size))
            self._used += gathered_bytes(num_ranks, [size])
        return places


def _typed(place: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    """Bytes (R, bytes) as a tensor (R, …) of this dtype."""
    return place.flatten().view(dtype).view(len(place), *shape)
