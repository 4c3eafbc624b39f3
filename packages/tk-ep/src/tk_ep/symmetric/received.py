"""What receive_tokens writes, and how it marks tokens and rows that there are not."""

from typing import NamedTuple

import tilelang.language as T
import torch

from tk_ep.symmetric import rows
from tk_ep.symmetric.kernels import Sizes
from tk_ep.symmetric.push_tokens import Content
from tk_ep.symmetric.receive_tokens import Numbers, Results
from tk_ep.symmetric.rows import Stage

_TOKEN, _OUTSIDE, _PADDING = range(3)
"""What a row is: past all segments it is outside."""


class Outputs(NamedTuple):
    """The kernel's arguments for results, in this order; with a handle metadata is read, not written."""

    metadata: T.Buffer  # int32 (tokens, 2 + K)
    x: T.Buffer  # int32 (rows, words)
    sf: "T.Buffer | None"  # int32 (rows, S)
    idx: "T.Buffer | None"  # (tokens, K)
    weights: "T.Buffer | None"  # int32 (rows, 1) or (tokens, K)
    first_rows: "T.Buffer | None"  # int32 (R, L), which is read
    pos_to_expert: "T.Buffer | None"  # int32 (rows)


def outputs(sizes: Sizes, content: Content, idx_dtype: torch.dtype, results: Results) -> Outputs:
    """The arguments that these results need."""
    num_ranks, _, num_topk = sizes
    metadata = T.arg("metadata", T.Tensor((T.dynamic("metadata_rows"), 2 + num_topk), "int32"))
    words = content.layout(num_topk).data * 4
    x = T.arg("recv_x", T.Tensor((T.dynamic("recv_rows"), words), "int32"))
    sf = idx = weights = first_rows = pos_to_expert = None
    if content.num_factors:
        sf = T.arg("recv_sf", T.Tensor((T.dynamic("sf_rows"), content.num_factors), "int32"))
    if not results.do_expand:
        idx = T.arg("recv_idx", T.Tensor((T.dynamic("idx_rows"), num_topk), idx_dtype))
    if content.has_weights:
        columns = 1 if results.do_expand else num_topk
        weights = T.arg("recv_weights", T.Tensor((T.dynamic("weight_rows"), columns), "int32"))
    if not results.has_handle:
        first_rows = T.arg("first_rows", T.Tensor((num_ranks, sizes.num_local_experts), "int32"))
        if results.do_expand:
            pos_to_expert = T.arg("pos_to_expert", T.Tensor((T.dynamic("expert_rows"),), "int32"))
    return Outputs(metadata, x, sf, idx, weights, first_rows, pos_to_expert)


class Facts(NamedTuple):
    """What is known of a token."""

    place: T.PrimExpr  # its source · num_max_tokens + its index there
    last: T.PrimExpr  # its source · K + its last slot here
    local: T.PrimExpr  # the expert of the lane's slot, negative for none here
    weight: T.PrimExpr  # of the lane's slot


@T.macro
def write_token(
    out: Outputs, index: T.PrimExpr, at: T.PrimExpr, lane: T.PrimExpr, facts: Facts, factors: T.Buffer
) -> None:
    """Write what belongs to a token beside its data; all lanes of a warp call it.

    `at` is the row of the lane's slot, or without do_expand, for the first lane, the token's; negative for none.
    `factors` has the lane's.
    """
    to = T.alloc_var("int32", init=0)
    num_topk = int(out.metadata.shape[1]) - 2
    do_expand = out.idx is None
    if do_expand:
        if at >= 0:
            if out.weights is not None:
                out.weights[at, 0] = facts.weight
            if out.pos_to_expert is not None:
                out.pos_to_expert[at] = facts.local
    elif lane < num_topk:
        out.idx[index, lane] = T.cast(T.max(facts.local, -1), out.idx.dtype)
        if out.weights is not None:
            out.weights[index, lane] = facts.weight
    if out.first_rows is not None:
        if lane == 0:
            out.metadata[index, 0] = facts.place
            out.metadata[index, 1] = facts.last
        if lane < num_topk:
            out.metadata[index, 2 + lane] = at if do_expand else -1
    if out.sf is not None:
        for j in T.unroll(factors.shape[0]):
            for k in T.unroll(num_topk if do_expand else 1):
                to = T.shfl_sync(at, k)
                if to >= 0 and j * 32 + lane < out.sf.shape[1]:
                    out.sf[to, j * 32 + lane] = factors[j]


@T.macro
def clear_tokens(out: Outputs, n: Numbers, first: T.PrimExpr, step: T.PrimExpr, lane: T.PrimExpr) -> None:
    """Mark places past the received tokens, every `step`th from `first` on; all lanes of a warp call it."""
    index = T.alloc_var("int32", init=0)
    writes_metadata = out.first_rows is not None
    num_topk = int(out.metadata.shape[1]) - 2
    index = first
    while index < n.num_tokens:
        if lane < 2 and writes_metadata:
            out.metadata[index, lane] = -1
        if lane < num_topk:
            if writes_metadata:
                out.metadata[index, 2 + lane] = -1
            if out.idx is not None:
                out.idx[index, lane] = T.cast(-1, out.idx.dtype)
        index = index + step


@T.macro
def clear_rows(
    out: Outputs,
    s: Stage,
    ends: T.Buffer,
    n: Numbers,
    first: T.PrimExpr,
    step: T.PrimExpr,
    with_zeros: bool,
) -> None:
    """Mark rows that have no token, of every `step`th 32 from the `first` on; with_zeros zero them in segments.

    `ends` has the rows at which experts' tokens end. A row's expert is the first whose padding ends behind it.
    """
    row, low, high, middle, kind = (T.alloc_var("int32", init=0) for _ in range(5))
    num_local = int(ends.shape[0])
    if with_zeros:
        rows.clear(s)
    row = first * 32 + s.lane
    while row - s.lane < n.num_rows:
        low = 0
        high = num_local
        while low < high:
            middle = (low + high) >> 1
            if T.truncdiv(ends[middle] + n.alignment - 1, n.alignment) * n.alignment > row:
                high = middle
            else:
                low = middle + 1
        kind = _TOKEN
        if row < n.num_rows:
            if low == num_local:
                kind = _OUTSIDE
            elif row >= ends[low]:
                kind = _PADDING
        if kind > _TOKEN:
            if out.weights is not None:
                out.weights[row, 0] = 0
            if out.pos_to_expert is not None:
                out.pos_to_expert[row] = -1
        if with_zeros:
            if kind == _PADDING:
                rows.store(s, 0, int(out.x.shape[1]) // 4, out.x, row)
                if out.sf is not None:
                    for j in T.serial(int(out.sf.shape[1])):
                        out.sf[row, j] = 0
            T.tma_store_arrive()
        row = row + step * 32
