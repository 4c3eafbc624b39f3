"""From products of queries and keys to scores, in registers: the sum over heads of weight · max(product, 0).

A warpgroup has the products of 64 keys with all heads of some queries, at most 128 columns, as the tensor core leaves
them: rows lane // 4 and lane // 4 + 8 of a warp's 16 keys, and of each 8 columns the two from lane % 4 · 2 on. So a
thread has for each of its two keys and each query a quarter of the heads, and four neighbours, a quad, have all.

The order of a sum is the same wherever a kernel puts a query and a key: in a thread the even columns' heads, then the
odd ones', ascending; then ((lane 0 + lane 1) + (lane 2 + lane 3)) of the quad.

max(x, 0) is half of x + |x|, and the whole sum is halved: an addition keeps NaN, and takes half a maximum's cycles. A
power of two changes no bits, unless a sum is above 2¹²⁷ or denormal.
"""

from typing import NamedTuple

import tilelang.language as T
from tilelang.layout import Fragment

KEYS = 64
"""Keys of a product: the rows of the tensor core's instruction."""
COLUMNS = 128
"""The most columns of a product: all heads of some queries."""


class Fold(NamedTuple):
    """A thread's state, in registers."""

    num_heads: int
    num_queries: int
    weights: T.Buffer  # float32 (columns / 4): of each 8 columns two
    sums: T.Buffer  # float32 (2, queries): for each of two keys; in the end [0] for half of the queries and one key


def fold(num_heads: int, num_queries: int) -> Fold:
    """A thread's state."""
    weights = T.alloc_local((num_queries * num_heads // 4,), "float32")
    return Fold(num_heads, num_queries, weights, T.alloc_local((2, num_queries), "float32"))


def per_lane(num_queries: int) -> int:
    """Queries of which a lane has the sum in the end."""
    return (num_queries + 1) // 2


def key_of_lane() -> T.PrimExpr:
    """Which of the 64 keys a lane has the sums of in the end."""
    thread = T.get_thread_binding() % 128
    return thread // 32 * 16 + thread % 2 * 8 + thread % 32 // 4


def first_query_of_lane(num_queries: int) -> T.PrimExpr:
    """The first of the queries of which a lane has the sum in the end; the others follow. All have a middle one."""
    return T.get_thread_binding() % 4 // 2 * (num_queries // 2)


def _threads() -> Fragment:
    """The layout of a loop over a warpgroup's warps, the 8 quads of a warp and their lanes: a thread each."""
    return Fragment(
        (4, 8, 4),
        forward_thread_fn=lambda warp, quad, lane: warp * 32 + quad * 4 + lane,
        forward_index_fn=lambda warp, quad, lane: 0,
    )


@T.macro
def read_weights(f: Fold, weights: T.Buffer, stage: T.PrimExpr, first: int) -> None:
    """Read the weights of the thread's columns from shared memory, those of the warpgroup from index `first` on."""
    lane = T.get_thread_binding() % 4
    for step in T.unroll(f.num_queries * f.num_heads // 8):
        for parity in T.vectorized(2):
            f.weights[2 * step + parity] = weights[stage, first + 8 * step + 2 * lane + parity]


@T.macro
def sum_heads(f: Fold, products: T.Buffer) -> None:
    """f.sums[0, x] = the sum over heads for key `key_of_lane` and the x-th of the lane's queries."""
    num_queries, num_steps = f.num_queries, f.num_heads // 8
    for warp, quad, lane in T.Parallel(4, 8, 4, loop_layout=_threads()):
        for r in T.unroll(2):
            for q in T.unroll(num_queries):
                f.sums[r, q] = T.float32(0)
                for parity in T.unroll(2):
                    for step in T.unroll(num_steps):
                        x = products[16 * warp + 8 * r + quad, (q * num_steps + step) * 8 + 2 * lane + parity]
                        weight = f.weights[(q * num_steps + step) * 2 + parity]
                        f.sums[r, q] = T.ieee_fmaf(weight, x + T.abs(x), f.sums[r, q])
    # Lanes of a quad exchange halves: first each gives away one of its two keys, then half of the queries.
    others = num_queries // 2  # The first query of lanes 2 and 3.
    kept, given = T.alloc_var("float32"), T.alloc_var("float32")
    lane_of_quad = T.get_thread_binding() % 4
    for q in T.unroll(num_queries):
        kept = T.if_then_else(lane_of_quad % 2 == 0, f.sums[0, q], f.sums[1, q])
        given = T.if_then_else(lane_of_quad % 2 == 0, f.sums[1, q], f.sums[0, q])
        f.sums[0, q] = kept + T.shfl_xor(given, 1)
    for q in T.unroll(num_queries - others):
        kept = T.if_then_else(lane_of_quad < 2, f.sums[0, q], f.sums[0, others + q])
        given = T.if_then_else(lane_of_quad < 2, f.sums[0, others + q], f.sums[0, q])
        f.sums[0, q] = T.float32(0.5) * (kept + T.shfl_xor(given, 2))
