"""Steps by which a tile of results leaves a thread block. Only kernels import this."""

from typing import Any

import tilelang.language as T

from tk_gemm.lib.fp8_product_config import BLOCK_M
from tk_gemm.lib.fp8_product_steps import A_GROUP, COL, NUM_ROWS, ROW

NUM_OUTS = 2
"""Parts of a tile in shared memory: one is filled while TMA empties the other."""
_CONSUMERS = 256
_BARRIER = 4
"""Number of the hardware barrier of the multiplying warps; TileLang takes 1 to 3 itself."""


@T.macro
def write(kind: Any, acc: Any, c: Any, is_row: Any, m: Any, n: Any, place: Any, out: Any, d: Any) -> None:
    """Begin to write acc + c, zero in rows that are no group's, into D; c and is_row may be None.

    `out` is (NUM_OUTS, rows, columns of a part). Before a thread block ends, T.tma_store_wait(0).
    """
    part_n = out.shape[2]
    if c is not None:
        for i, j in T.Parallel(*acc.shape):
            if place[ROW] + i < m and place[COL] + j < n:
                acc[i, j] += T.cast(c[place[A_GROUP], place[ROW] + i, place[COL] + j], "float32")
    if is_row is not None:
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = T.if_then_else(is_row[i] != 0, acc[i, j], T.float32(0))
    T.tma_store_wait(0)
    for part in T.unroll(acc.shape[1] // part_n):
        T.tma_store_wait(NUM_OUTS - 1)
        T.sync_threads(_BARRIER, _CONSUMERS)
        T.copy(acc[:, part * part_n : (part + 1) * part_n], out[part % NUM_OUTS, :, :])
        T.fence_proxy_async()
        T.sync_threads(_BARRIER, _CONSUMERS)
        _store(kind, out, part, d, n, place)


@T.macro
def _store(kind: Any, out: Any, part: Any, d: Any, n: Any, place: Any) -> None:
    if kind == "masked":
        if place[NUM_ROWS] < BLOCK_M:  # Rows past masked_m are not to be written, and TMA knows of M_max alone.
            col = place[COL] + part * out.shape[2]
            for i, j in T.Parallel(BLOCK_M, out.shape[2]):
                if i < place[NUM_ROWS] and col + j < n:
                    d[place[A_GROUP], place[ROW] + i, col + j] = out[part % NUM_OUTS, i, j]
        else:
            _store_whole(out, part, d, place)
    else:
        _store_whole(out, part, d, place)


@T.macro
def _store_whole(out: Any, part: Any, d: Any, place: Any) -> None:
    col = place[COL] + part * out.shape[2]
    rows = d[place[A_GROUP], place[ROW] : place[ROW] + BLOCK_M, col : col + out.shape[2]]
    T.tma_copy(out[part % NUM_OUTS, :, :], rows)
