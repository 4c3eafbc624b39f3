"""Steps of the products whose groups are ranges of K. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_config import STRIP
from tk_gemm.lib.fp8_product_steps import A_GROUP, B_GROUP, COL, PLACE_SIZE, ROW

FIRST_STEP, NUM_STEPS = PLACE_SIZE, PLACE_SIZE + 1
"""More elements of a tile's place: its group's range of K, in steps. A_GROUP is the group of C and D."""
K_PLACE_SIZE = PLACE_SIZE + 2
_ALIGNMENT = 128


def _aligned(end: Any, k: Any) -> Any:
    """Where the group after one that ends at `end` begins; K is a multiple of the alignment."""
    return T.ceildiv(T.max(T.min(end, k), 0), _ALIGNMENT) * _ALIGNMENT


@T.macro
def find_k_tile(
    tile: Any,
    total: Any,
    ends: Any,
    m: Any,
    n: Any,
    k: Any,
    block_m: Any,
    block_n: Any,
    step_k: Any,
    place: Any,
) -> None:
    """place = that of a tile below `total`: one group after the other, each in strips of STRIP · 128 rows."""
    if tile < total:
        group = T.alloc_var("int32")
        inner = T.alloc_var("int32")
        strip = T.alloc_var("int32")
        num_m = T.alloc_var("int32")
        first = T.alloc_var("int32")
        end = T.alloc_var("int32")
        strip_size = STRIP * 128 // block_m
        num_n = T.ceildiv(n, block_n)
        group = T.truncdiv(tile, T.ceildiv(m, block_m) * num_n)
        inner = T.truncmod(tile, T.ceildiv(m, block_m) * num_n)
        strip = T.truncdiv(inner, strip_size * num_n)
        inner = T.truncmod(inner, strip_size * num_n)
        num_m = T.min(strip_size, T.ceildiv(m, block_m) - strip * strip_size)
        first = 0
        if group > 0:
            first = _aligned(ends[group - 1], k)
        end = _aligned(ends[group], k)
        place[ROW] = (strip * strip_size + T.truncmod(inner, num_m)) * block_m
        place[COL] = T.truncdiv(inner, num_m) * block_n
        place[A_GROUP] = group
        place[B_GROUP] = 0
        place[FIRST_STEP] = T.truncdiv(first, step_k)
        place[NUM_STEPS] = T.truncdiv(T.max(end - first, 0), step_k)


@T.macro
def find_group(ends: Any, num_groups: Any, k: Any, channel: Any, group: Any) -> None:
    """group = [first group that ends after a channel, where it begins, where it ends], or [num_groups, 0, 0]."""
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    low = 0
    high = num_groups
    while low < high:
        middle = (low + high) >> 1
        if _aligned(ends[middle], k) > channel:
            high = middle
        else:
            low = middle + 1
    group[0] = low
    group[1] = 0
    group[2] = 0
    if low < num_groups:
        group[2] = _aligned(ends[low], k)
        if low > 0:
            group[1] = _aligned(ends[low - 1], k)
