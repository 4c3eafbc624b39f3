"""A tile of rows in registers, scaled by rows and columns, with the norms of its rows."""

from typing import Any

import tilelang.language as T

from tk_engram.lib.scaled_rows import RowTile


def rows_layout(num_rows: int, columns: int, tile: RowTile) -> Any:
    """Layout of a fragment (num_rows, columns) as `RowTile` shows it."""
    group, vector = tile.threads_per_row, tile.vector
    columns_per_thread = columns // group

    def thread_and_register(row: Any, column: Any) -> tuple[Any, Any]:
        thread = row % tile.num_groups * group + column // vector % group
        register = column // (vector * group) * vector + column % vector
        return thread, row // tile.num_groups * columns_per_thread + register

    return T.Fragment((num_rows, columns), forward_fn=thread_and_register)


@T.macro
def load_scaled(
    matrix: T.Buffer, row_scale: T.Buffer, col_scale: T.Buffer, first_row: Any, x: T.Buffer, scales: T.Buffer
) -> None:
    """x = (row_scale · matrix) · col_scale for rows from the first on, both products rounded; scales = row_scale.

    Beyond the last row and column x is 0.
    """
    rows, columns = x.shape
    width = matrix.shape[1]
    T.copy(matrix[first_row : first_row + rows, 0:columns], x)
    T.copy(row_scale[first_row : first_row + rows], scales)
    for i, d in T.Parallel(rows, columns):
        if d < width:
            x[i, d] = scales[i] * x[i, d] * col_scale[d]


@T.macro
def row_norms(x: T.Buffer, squares: T.Buffer, norms: T.Buffer, tile: RowTile) -> None:
    """norms[i] = √Σ_d x[i, d]²."""
    rows, columns = x.shape
    for i, d in T.Parallel(rows, columns):
        squares[i, d] = x[i, d] * x[i, d]
    T.reduce_sum(squares, norms, dim=1, batch=tile.rows_per_thread)
    for i in T.Parallel(rows):
        norms[i] = T.sqrt(norms[i])
