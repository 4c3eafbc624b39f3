"""Arguments that kernels have in common, in the order in which launches give them: see Rank."""

from typing import Any, NamedTuple, TypeVar

import tilelang.language as T
import torch

from tk_ep.symmetric.flags import Ranks
from tk_ep.symmetric.kernels import Sizes
from tk_ep.symmetric.push_tokens import Content

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


class Tokens(NamedTuple):
    """A rank's own tokens, and where they go."""

    x: T.Buffer  # int32 (tokens, words)
    slots: T.Buffer  # (tokens, K)
    dst_slots: T.Buffer  # int32 (tokens, K)
    sf: "T.Buffer | None"  # int32 (tokens, S), with any strides
    weights: "T.Buffer | None"  # int32 (tokens, K)
    end: int | None  # of the slots that are experts, if a handle has them, which may have any others

    def slot(self, token: T.PrimExpr, lane: T.PrimExpr) -> T.PrimExpr:
        """int32: see memory.TokenRow; a handle's are experts alone."""
        slot = self.slots[token, lane]
        if self.end is None:
            return slot
        return T.if_then_else(T.And(slot >= 0, slot < self.end), T.cast(slot, "int32"), -1)


def tokens(sizes: Sizes, content: Content, handle_dtype: torch.dtype | None) -> Tokens:
    """The arguments of a rank's tokens; with the dtype of a handle's experts, if one has the routing."""
    num_topk = sizes.num_topk
    x = T.arg("x", T.Tensor((T.dynamic("x_rows"), content.layout(num_topk).data * 4), "int32"))
    slots = T.arg("slots", T.Tensor((T.dynamic("slot_rows"), num_topk), handle_dtype or "int32"))
    dst_slots = T.arg("dst_slots", T.Tensor((T.dynamic("dst_rows"), num_topk), "int32"))
    sf = weights = None
    if content.num_factors:
        strides = tuple(T.dynamic(f"sf_{dim}_stride", "int64") for dim in ("row", "col"))
        sf = T.arg("sf", T.StridedTensor((T.dynamic("factor_rows"), content.num_factors), strides, "int32"))
    if content.has_weights:
        weights = T.arg("weights", T.Tensor((T.dynamic("weights_rows"), num_topk), "int32"))
    return Tokens(x, slots, dst_slots, sf, weights, None if handle_dtype is None else sizes.num_experts)
