"""Arguments that kernels have in common, in the order in which launches give them: see Rank."""

from typing import Any, TypeVar

import tilelang.language as T

from tk_ep.symmetric.flags import Ranks

Numbers = TypeVar("Numbers", bound=tuple[Any, ...])


def scalars(kind: type[Numbers]) -> Numbers:
    """An int32 for each field of a NamedTuple."""
    return kind(*(T.arg(name, T.int32()) for name in kind._fields))


def ranks(num_ranks: int, op: int, waits: bool = True) -> Ranks:
    """own, rank and the buffers of all ranks; for a kernel that waits limit and host."""
    num_units = T.dynamic("num_units")
    own, rank = T.arg("own", T.Tensor((num_units, 4), "int32")), T.arg("rank", T.int32())
    peers = tuple(T.arg(f"peer_{r}", T.Tensor((num_units, 4), "int32")) for r in range(num_ranks))
    limit, host = (T.arg(name, T.int64()) if waits else T.int64(0) for name in ("limit", "host"))
    return Ranks(own, peers, rank, op, limit, host)
