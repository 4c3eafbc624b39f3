"""engram_lookup_bwd: gradient of `engram_lookup` by the table, dense or of the rows that were looked up.

    grad[r] += Σ d_o[t, c]   over the pairs (t, c) with indices[t, c] = r, in float32, (t, c) ascending from 0

Source: "Conditional Memory via Scalable Lookup" (Engram), arXiv 2601.07372.

torch sorts the pairs by row, stably, so that those of a row follow each other in their order, a segment. A thread block
takes 64 sorted pairs and a piece of their channels. It owns the segments that begin among them, the last to its end:

    rows of pairs   … 3 3 | 3 7 7 7 9 12 12 | 12 12 …      bars: ends of the block's 64 pairs
                            7 7 7 9 12 12     12 12 …      what it adds up

The 64 rows of d_o are loaded at once into shared memory. Then a thread goes down the pairs of its channel and leaves
the sum so far in the place of each value, so that at the end of a segment lies its total; these are stored together.
Of a segment that goes on, 64 more pairs are loaded while the 64 before them are added up: a row with thousands of pairs
holds up the few blocks that own its pieces, and nothing else.

For the sparse form a kernel marks where segments begin, and torch's cumulative sum of that numbers them.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import given_or_new, launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_engram.lib.indices import check_indices, piece_channels

_DTYPES = (torch.bfloat16, torch.float32)
_MAX_ROWS = 2**31 - 1


_BLOCK_PAIRS = 64
_STORE_PAIRS = 16
"""Pairs whose totals are stored at a time; of a given gradient, so many rows are loaded at once. Untuned."""


@kernel
def _mark_segments_kernel(arch: Arch) -> Any:
    """is_first[i] = 1 where sorted pair i is the first of its row, and that is a row of the table, else 0."""
    import tilelang.language as T

    block_pairs = 1024
    num_pairs = T.dynamic("num_pairs")

    @T.prim_func
    def mark_segments(
        sorted_rows: T.Tensor((num_pairs,), "int32"), is_first: T.Tensor((num_pairs,), "int32"), num_rows: T.int32
    ) -> None:
        with T.Kernel(T.ceildiv(num_pairs, block_pairs), threads=256) as block:
            for i in T.Parallel(block_pairs):
                pair = block * block_pairs + i
                if pair < num_pairs:
                    row = sorted_rows[pair]
                    before = T.if_then_else(pair > 0, sorted_rows[pair - 1], -1)
                    is_first[pair] = T.cast(row >= 0 and row < num_rows and row != before, "int32")

    return mark_segments


@kernel(pass_configs=DIRECT_COPIES)
def _add_pairs_kernel(dim: int, dtype: torch.dtype, target: Literal["new", "given", "sparse"], arch: Arch) -> Any:
    """`target`: a gradient of zeros, one to be added to, or the totals alone, one after the other."""
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import pairs_of_threads

    block_pairs, store_pairs = _BLOCK_PAIRS, _STORE_PAIRS
    block_channels = threads = piece_channels(dim, 128)  # a thread adds up one channel
    pieces, element = dim // block_channels, T.dtype(dtype)
    is_sparse, is_given = target == "sparse", target == "given"
    num_pairs, num_rows = T.dynamic("num_pairs"), T.dynamic("num_rows")

    @T.macro
    def load(d_o: T.Buffer, pairs: T.Buffer, channel: Any, values: T.Buffer) -> None:
        for i, j in T.Parallel(block_pairs, block_channels):
            values[i, j] = T.if_then_else(pairs[i] >= 0, d_o[pairs[i], channel + j], T.cast(0, element))

    @T.macro
    def find_next(sorted_rows: T.Buffer, order: T.Buffer, first: Any, row: Any, pairs: T.Buffer) -> None:
        """The pairs of `row` among `block_pairs` from `first` on, -1 behind them."""
        for i in T.Parallel(block_pairs):
            is_next = first + i < num_pairs and sorted_rows[first + i] == row
            pairs[i] = T.if_then_else(is_next, T.cast(order[first + i], "int32"), -1)

    @T.prim_func
    def add_pairs(
        d_o: T.Tensor((num_pairs, dim), element),
        sorted_rows: T.Tensor((num_pairs,), "int32"),
        order: T.Tensor((num_pairs,), "int64"),
    ) -> None:
        if is_sparse:
            # Of the segments, from 1 on.
            ordinals = T.arg("ordinals", T.Tensor((num_pairs,), "int32"))
            rows_out = T.arg("rows", T.Tensor((num_pairs,), "int32"))
            totals = T.arg("values", T.Tensor((num_pairs, dim), "float32"))
            count = T.arg("count", T.Tensor((1,), "int32"))
            T.arg("num_rows", num_rows)
        else:
            totals = T.arg("grad", T.Tensor((num_rows, dim), "float32"))

        with T.Kernel(T.ceildiv(num_pairs, block_pairs) * pieces, threads=threads) as block:
            first, channel = block // pieces * block_pairs, block % pieces * block_channels
            # Rows of the pairs from the one before the block's to the one behind; -1 for none.
            rows = T.alloc_shared((block_pairs + 2,), "int32")
            # Each pair's row of d_o, -1 if it is not the block's own; row for the total that ends there, -1 for none.
            pairs = T.alloc_shared((block_pairs,), "int32")
            places = T.alloc_shared((block_pairs,), "int32")
            sums = T.alloc_shared((block_pairs, block_channels), "float32")
            values = T.alloc_fragment((block_pairs, block_channels), element)
            total = T.alloc_fragment((block_channels,), "float32")
            T.annotate_layout(
                {
                    values: pairs_of_threads((block_pairs, block_channels), threads),
                    total: T.Fragment((block_channels,), forward_fn=lambda j: (j, 0)),
                }
            )

            for i in T.Parallel(block_pairs + 2):
                pair = first + i - 1
                row = T.if_then_else(sorted_rows[pair] < num_rows, sorted_rows[pair], -1)
                rows[i] = T.if_then_else(pair >= 0 and pair < num_pairs, row, -1)
            for i in T.Parallel(block_pairs):
                is_own = rows[i + 1] >= 0 and rows[i + 1] != rows[0]
                pairs[i] = T.if_then_else(is_own, T.cast(order[first + i], "int32"), -1)
            for i in T.Parallel(block_pairs):
                target_row = ordinals[first + i] - 1 if is_sparse else rows[i + 1]
                places[i] = T.if_then_else(pairs[i] >= 0 and rows[i + 2] != rows[i + 1], target_row, -1)
            T.clear(total)
            load(d_o, pairs, channel, values)
            T.copy(values, sums)
            for i in T.unroll(block_pairs):
                for j in T.Parallel(block_channels):
                    total[j] = T.if_then_else(rows[i + 1] == rows[i], total[j], T.float32(0)) + sums[i, j]
                for j in T.Parallel(block_channels):
                    sums[i, j] = total[j]

            for part in T.serial(block_pairs // store_pairs):
                first_stored = part * store_pairs
                if is_given:
                    # All loads before the first store.
                    before = T.alloc_fragment((store_pairs, block_channels), "float32")
                    for i, j in T.Parallel(store_pairs, block_channels):
                        target_row = places[first_stored + i]
                        before[i, j] = T.if_then_else(target_row >= 0, totals[target_row, channel + j], T.float32(0))
                    for i, j in T.Parallel(store_pairs, block_channels):
                        before[i, j] += sums[first_stored + i, j]
                    for i, j in T.Parallel(store_pairs, block_channels):
                        if places[first_stored + i] >= 0:
                            totals[places[first_stored + i], channel + j] = before[i, j]
                else:
                    for i, j in T.Parallel(store_pairs, block_channels):
                        if places[first_stored + i] >= 0:
                            totals[places[first_stored + i], channel + j] = sums[first_stored + i, j]

            if is_sparse:
                for i in T.Parallel(1):
                    if block == 0:
                        count[i] = ordinals[num_pairs - 1]
                for i in T.Parallel(block_pairs):
                    if channel == 0 and rows[i + 1] >= 0 and rows[i + 1] != rows[i]:
                        rows_out[ordinals[first + i] - 1] = rows[i + 1]
                for i in T.Parallel(block_pairs):
                    if channel == 0 and first + i < num_pairs and first + i >= ordinals[num_pairs - 1]:
                        rows_out[first + i] = -1
                for i, j in T.Parallel(block_pairs, block_channels):
                    if first + i < num_pairs and first + i >= ordinals[num_pairs - 1]:
                        totals[first + i, channel + j] = T.float32(0)

            # The last segment goes on behind the block's pairs.
            if pairs[block_pairs - 1] >= 0 and places[block_pairs - 1] < 0:
                next_pair, is_more = T.alloc_var("int32"), T.alloc_var("int32")
                later = T.alloc_fragment((block_pairs,), "int32")
                next_pair = first + block_pairs
                is_more = 0
                find_next(sorted_rows, order, next_pair, rows[block_pairs], later)
                T.copy(later, pairs)
                load(d_o, pairs, channel, values)
                next_pair += block_pairs
                find_next(sorted_rows, order, next_pair, rows[block_pairs], later)
                is_more = pairs[0]
                while is_more >= 0:
                    T.copy(values, sums)
                    T.copy(later, pairs)
                    load(d_o, pairs, channel, values)
                    next_pair += block_pairs
                    find_next(sorted_rows, order, next_pair, rows[block_pairs], later)
                    is_more = pairs[0]
                    # Zeros behind the segment change nothing: from 0 on, no sum is -0.
                    for i in T.unroll(block_pairs):
                        for j in T.Parallel(block_channels):
                            total[j] += sums[i, j]
                    # TileLang does not see that the next turn writes what this one reads.
                    T.sync_threads()
                for j in T.Parallel(block_channels):
                    if is_sparse:
                        totals[ordinals[first + block_pairs - 1] - 1, channel + j] = total[j]
                    elif is_given:
                        totals[rows[block_pairs], channel + j] += total[j]
                    else:
                        totals[rows[block_pairs], channel + j] = total[j]

    return add_pairs


def _launch_sparse(d_o: Tensor, indices: Tensor, num_rows: int, rows: Tensor, values: Tensor, count: Tensor) -> None:
    if indices.numel() == 0:
        count.zero_()
        return
    arch = get_arch(d_o.device)
    sorted_rows, order = torch.sort(indices.view(-1), stable=True)
    is_first = torch.empty_like(sorted_rows)
    _mark_segments_kernel(arch)(sorted_rows, is_first, num_rows)
    ordinals = torch.cumsum(is_first, 0, dtype=torch.int32)
    add_pairs = _add_pairs_kernel(values.shape[1], d_o.dtype, "sparse", arch)
    add_pairs(d_o.view(values.shape), sorted_rows, order, ordinals, rows, values, count, num_rows)


@op(writes=("grad",), aligned=("d_o", "grad"))
def engram_lookup_bwd(
    d_o: Tensor, indices: Tensor, num_rows: int, *, grad: Tensor | None = None, sparse: bool = False
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Gradient of `engram_lookup` by the table: each row's sum of d_o over the pairs (t, c) that looked it up.

    The terms of a row are added up in float32, (t, c) ascending from 0, and the sum is then added to `grad`, so every
    bit is defined. Negative indices have no gradient. Nothing waits for the device. Source: Engram, arXiv 2601.07372.

    Args:
        d_o: bfloat16 or float32 (T, C, D), contiguous, the gradient by the result; D a multiple of 32.
        indices: int32 (T, C), contiguous, as the forward was given them. An index of num_rows or more counts as
            negative (`TK_DEBUG=1` raises ValueError).
        num_rows: R, rows of the table, 1 to 2³¹ - 1.
        grad: float32 (R, D), contiguous, to be added to, of no other argument's memory; None for a new one.
        sparse: return only the rows that were looked up.

    Returns:
        The gradient, float32 (R, D): `grad`, if it was given. If sparse, (rows, values, count) instead: int32 (T·C),
        the rows looked up, ascending, then -1; float32 (T·C, D), their gradients, then zeros; int32 (1), their number.

    Raises:
        TypeError: a tensor is not of its dtype, num_rows no int, or sparse no bool.
        ValueError: a shape, stride or device does not fit, num_rows is out of range, or grad comes with sparse.
    """
    num_tokens, num_columns, dim = check.tensor("d_o", d_o, _DTYPES, ("T", "C", "D"))
    check.require(dim >= 32, "D (last dimension of d_o)", "at least 32", dim)
    check.multiple_of("D (last dimension of d_o)", dim, 32)
    check.in_range("num_rows", num_rows, 1, _MAX_ROWS)
    shape = check_indices(indices, num_rows, d_o.device)
    check.require(shape == (num_tokens, num_columns), "indices", "shape ({}, {})", shape, num_tokens, num_columns)
    check.flag("sparse", sparse)
    if sparse:
        check.require(grad is None, "grad", "None with sparse=True", type(grad).__name__)
        rows = new(indices.new_empty, (num_tokens * num_columns,))
        values = new(d_o.new_empty, (num_tokens * num_columns, dim), dtype=torch.float32)
        count = new(indices.new_empty, (1,))
        if launching(rows, values, count):
            _launch_sparse(d_o, indices, num_rows, rows, values, count)
        return rows, values, count
    target = "new" if grad is None else "given"
    grad = given_or_new("grad", grad, d_o, (num_rows, dim), torch.float32)
    if launching(grad):
        if target == "new":
            grad.zero_()
        if indices.numel():
            sorted_rows, order = torch.sort(indices.view(-1), stable=True)
            add_pairs = _add_pairs_kernel(dim, d_o.dtype, target, get_arch(d_o.device))
            add_pairs(d_o.view(-1, dim), sorted_rows, order, grad)
    return grad
