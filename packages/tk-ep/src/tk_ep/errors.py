"""Errors that are about the ranks of a group, not about an argument."""


class EPTimeoutError(RuntimeError):
    """A rank waited for its peers longer than the buffer's limit, or lost one: a peer is late, has failed or is gone.

    The buffer cannot be used any more: each later call raises this error again.
    """

    def __init__(self, op: str, rank: int, reason: str) -> None:
        super().__init__(f"{op}: rank {rank} {reason}; the buffer cannot be used any more")
        self.op = op
        """The call that waited, such as "dispatch"."""
        self.rank = rank
        """The rank that waited, in the buffer's group."""
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.op, self.rank, self.reason)


class UnsupportedTopologyError(RuntimeError):
    """The backend asked for does not serve this group: two of its ranks cannot reach each other's memory."""

    def __init__(self, reason: str, ranks: tuple[int, int]) -> None:
        super().__init__(f"{reason} (ranks {ranks[0]} and {ranks[1]})")
        self.reason = reason
        self.ranks = ranks
        """Two ranks of the group, the first pair that is found not to reach each other."""

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, int]]]:
        return type(self), (self.reason, self.ranks)
