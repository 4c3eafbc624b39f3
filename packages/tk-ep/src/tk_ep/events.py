"""Events of CUDA streams with DeepEP's names. Where this process has not used CUDA they do nothing."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch


class EventHandle:
    """A point in the current CUDA stream: what was launched there before this object was made."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait until this point is reached."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The end of a call that the current stream does not wait for yet.

    `with event:` runs its block beside the call, and makes the current stream wait where the block ends.

    Args:
        event: where the call ends; None if there is nothing to wait for.
        extra_tensors: tensors that must not be freed before the wait.
        check: called after the wait; it raises if the call has failed.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[Any, ...] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._check = check

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the call; with release_handle forget the event.

        Raises EPTimeoutError if the buffer is known to have failed.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        self.extra_tensors = None
        if release_handle:
            self.event = None
        if self._check is not None:
            self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()
