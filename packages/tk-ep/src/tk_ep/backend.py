"""What ElasticBuffer needs of a backend. It has checked all arguments, and made the communication stream current."""

from typing import Protocol

from torch import Tensor

from tk_ep.all_gather import Gathering
from tk_ep.check import CombineRequest, CombineResult, DispatchRequest, DispatchResult
from tk_ep.engram import FetchRequest, Storage
from tk_ep.pipeline import Pipes, SlotSizes


class Backend(Protocol):
    """Serves one buffer. Every method but `check` and `release` is collective.

    A method that raises leaves the buffer failed: nothing but `release` is called afterwards. EPTimeoutError is raised
    where a peer is waited for past the buffer's limits.
    """

    name: str
    """What `ElasticBuffer.backend` tells, such as "collective"."""
    supports_capture: bool
    """Whether calls that need not wait on the host can be captured in a CUDA graph."""

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts, and receive. Adds the real counts to request.stats, if given."""
        ...

    def combine(self, request: CombineRequest) -> CombineResult:
        """Send rows back to the ranks of their tokens, and sum them there."""
        ...

    def gathering(self, num_bytes: int) -> Gathering:
        """What gathers in so many bytes, from now on."""
        ...

    def pipes(self, sizes: SlotSizes) -> Pipes:
        """What sends to neighbours, and receives from them."""
        ...

    def store(self, storage: Storage) -> Storage:
        """Keep a copy of the entries for all ranks to fetch, in place of those of before."""
        ...

    def fetch(self, storage: Storage, request: FetchRequest) -> tuple[Tensor, Tensor | None]:
        """The rows of entries, (T, m · H), and their factors, (T, m · S). Indices of no entry get zeros."""
        ...

    def barrier(self, with_cpu_sync: bool) -> None:
        """Pass when all ranks are here: the stream, and with_cpu_sync the host, too."""
        ...

    def check(self) -> None:
        """Raise EPTimeoutError if an earlier call has met its limit since it returned. Waits for nothing."""
        ...

    def release(self) -> None:
        """Free what the backend holds. Waits for no peer, and raises nothing."""
        ...
