"""Runs a call's work on the communication stream. On a CPU there are no streams."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from tk_ep.check import Event
from tk_ep.events import EventHandle, EventOverlap

T = TypeVar("T")


@cache
def get_comm_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The communication stream of a device, one in the process; None for a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dataclasses."""
    if isinstance(tree, Tensor):
        return [tree]
    if hasattr(tree, "__dataclass_fields__"):
        tree = tuple(vars(tree).values())
    return [each for item in tree for each in tensors_in(item)] if isinstance(tree, tuple | list) else []


def on_comm_stream(
    device: torch.device,
    call: Callable[[], T],
    inputs: tuple[Any, ...],
    previous_event: Event | None,
    async_with_compute_stream: bool,
    check: Callable[[], None],
) -> tuple[T, EventOverlap]:
    """Make a call with the communication stream current, and return its results and their event.

    The communication stream waits for `previous_event`, by default for all that the current stream was given. The
    current stream waits for the results, unless async_with_compute_stream leaves that to the event's wait, which also
    calls `check`. `inputs` has the tensors that the call reads, in nested tuples.
    """
    comm = get_comm_stream(device)
    if comm is None:
        return call(), EventOverlap(check=check)
    compute = torch.cuda.current_stream(device)
    if previous_event is None:
        comm.wait_stream(compute)
    with torch.cuda.stream(comm):
        if previous_event is not None:
            previous_event.current_stream_wait()
        results = call()
        event = EventHandle()
    kept = tensors_in(inputs) + tensors_in(results)
    if not async_with_compute_stream:
        event.current_stream_wait()
    if torch.cuda.is_current_stream_capturing():
        # A graph's memory is used again as soon as a tensor is freed, whatever stream has used it.
        return results, EventOverlap(event, tuple(kept), check)
    for each in kept:
        each.record_stream(comm)
        each.record_stream(compute)
    return results, EventOverlap(event, check=check)
