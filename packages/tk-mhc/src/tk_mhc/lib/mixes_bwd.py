"""Gradients of z = mixes · scale + base: sums over the tokens of a thread block.

Of C columns a thread has elements of one only, those of every `rows`-th token of a tile:

    token 0          thread 0        thread 1         …  thread C - 1
    token 1          thread C        thread C + 1     …  thread 2C - 1
    …
    token rows       thread 0 again, its second element
"""

from typing import Any

import tilelang.language as T


def thread_per_column(num_tokens: int, num_columns: int, rows: int) -> Any:
    """Layout of a fragment (num_tokens, num_columns) on rows · num_columns threads."""
    return T.Fragment((num_tokens, num_columns), lambda t, c: (t % rows * num_columns + c, t // rows))


@T.macro
def add_to_sums(d_z: T.Buffer, mixes: T.Buffer, base_sums: T.Buffer, scale_sums: T.Buffer) -> None:
    """Each thread adds its elements of d_z and d_z · mixes to its sums, in float64, tokens ascending."""
    rows, num_columns = base_sums.shape
    for u in T.unroll(d_z.shape[0] // rows):
        for r, c in T.Parallel(rows, num_columns):
            base_sums[r, c] += T.cast(d_z[u * rows + r, c], "float64")
        for r, c in T.Parallel(rows, num_columns):
            scale_sums[r, c] += T.cast(d_z[u * rows + r, c], "float64") * T.cast(mixes[u * rows + r, c], "float64")


@T.macro
def store_sums(
    base_sums: T.Buffer, scale_sums: T.Buffer, groups: tuple[tuple[int, int, int], ...], sums: T.Buffer, row: Any
) -> None:
    """Write a row of `sums`: each group's scale_sums, then each column's base_sums, added up over threads.

    `groups`: for each scale its index, its first column and the one after its last.
    """
    rows, num_columns = base_sums.shape
    num_scales = len(groups)
    by_thread = T.alloc_shared((2, rows, num_columns), "float64")
    by_column = T.alloc_shared((num_columns,), "float64")
    columns = T.alloc_fragment((num_columns,), "float64")
    total = T.alloc_fragment((1,), "float64")
    T.copy(base_sums, by_thread[0, :, :])
    T.copy(scale_sums, by_thread[1, :, :])

    T.clear(columns)
    for r in T.serial(rows):
        for c in T.Parallel(num_columns):
            columns[c] += by_thread[0, r, c]
    T.copy(columns, sums[row, num_scales : num_scales + num_columns])

    T.clear(columns)
    for r in T.serial(rows):
        for c in T.Parallel(num_columns):
            columns[c] += by_thread[1, r, c]
    T.copy(columns, by_column)
    for index, first, end in groups:
        T.clear(total)
        for c in T.serial(first, end):
            total[0] += by_column[c]
        T.copy(total, sums[row, index : index + 1])
