"""-∞ in scores outside of a row's window, by warps that compute none."""

import tilelang.language as T

FILLED = 4096
"""Columns of a row that a warp fills at a time, a chunk."""


@T.macro
def fill_chunk(out: T.Buffer, row: T.PrimExpr, chunk: T.PrimExpr, begin: T.PrimExpr, end: T.PrimExpr) -> None:
    """In a warp: write -∞ to a chunk's columns before `begin` and from `end` on, 16 bytes at a time where possible."""
    lane, num_cols = T.get_thread_binding() % 32, out.shape[1]
    per_store = 4 if out.dtype == "float32" else 8
    if begin > chunk * FILLED or end < T.min(num_cols, (chunk + 1) * FILLED):
        for j in T.serial(FILLED // (32 * per_store)):
            first = chunk * FILLED + (j * 32 + lane) * per_store
            if first + per_store <= num_cols and (first + per_store <= begin or first >= end):
                for v in T.vectorized(per_store):  # Written out, or TileLang does not see the multiple.
                    out[row, chunk * FILLED + (j * 32 + lane) * per_store + v] = -T.infinity(out.dtype)
            else:
                for v in T.unroll(per_store):
                    if first + v < num_cols and (first + v < begin or first + v >= end):
                        out[row, first + v] = -T.infinity(out.dtype)
