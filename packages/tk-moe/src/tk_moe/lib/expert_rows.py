"""Macros for rows of a value for each expert, of which each lane of a warp has some experts, in registers."""

from typing import Any, NamedTuple

import tilelang.language as T

from tk_moe.lib.selection import expert_of


class Run(NamedTuple):
    """Which experts a lane has: from `first` on, below `limit`, `length` of every 32 · length."""

    first: Any
    limit: Any
    length: int


def expert(run: Run, j: Any) -> Any:
    """The j-th expert of a lane, an expression; the lane has it if it is below run.limit."""
    return run.first + expert_of(j, 0, run.length)


@T.macro
def load_row(rows: T.Buffer, token: T.int32, run: Run, vector: int, padding: float, x: T.Buffer) -> None:
    """Load a lane's part of a token's row into x as float32, `padding` where the lane has no expert."""
    per_lane = int(x.shape[0])
    values = T.alloc_local((per_lane,), rows.dtype)
    for c in T.unroll(per_lane // vector):
        if expert(run, c * vector) < run.limit:
            for v in T.vectorized(vector):
                values[c * vector + v] = rows[token, expert(run, c * vector) + v]
    for j in T.unroll(per_lane):
        is_expert = expert(run, j) < run.limit
        x[j] = T.if_then_else(is_expert, T.cast(values[j], "float32"), T.float32(padding))


@T.macro
def store_row(x: T.Buffer, token: T.int32, run: Run, vector: int, rows: T.Buffer) -> None:
    """Store a lane's part of a token's row."""
    for c in T.unroll(int(x.shape[0]) // vector):
        if expert(run, c * vector) < run.limit:
            for v in T.vectorized(vector):
                rows[token, expert(run, c * vector) + v] = x[c * vector + v]


@T.macro
def add_row(row: T.Buffer, run: Run, vector: int, x: T.Buffer) -> None:
    """Add a lane's part of a row that all tokens share to x; where the lane has no expert, anything."""
    per_lane = int(x.shape[0])
    values = T.alloc_local((per_lane,), "float32")
    for c in T.unroll(per_lane // vector):
        if expert(run, c * vector) < run.limit:
            for v in T.vectorized(vector):
                values[c * vector + v] = row[expert(run, c * vector) + v]
    for j in T.unroll(per_lane):
        x[j] += values[j]
