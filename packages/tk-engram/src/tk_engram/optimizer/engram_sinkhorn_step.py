"""engram_sinkhorn_step: one Sinkhorn iteration over the rows of a matrix M (R, D), with the squares of its columns.

    x = (r · M) · c        norm = √Σ_d x²        q = 1 / (norm + eps)        r ← r · q        y = x · q
    col_sumsq_partial[p, d] = Σ y[i, d]² over the p-th range of ceil(R / 396) rows

in float32, r a scale a row and c one a column. M is not written. The next iteration's c is left to the caller, who
gets the sums of the partials from `engram_sinkhorn_step_reduce`.
Source: the optimizer step for embedding tables of TileKernels 2.1.0, `engram_sinkhorn_step`.

A thread block takes a range of rows and walks it in tiles (`RowTile`). Each group of threads that shares a row sums the
squares of columns in registers; the groups' sums are added up at the end, ascending.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import aligned
from tk_engram.lib.scaled_rows import RowTile, check_matrix
from tk_engram.sizes import NUM_PARTIALS


@kernel(pass_configs=DIRECT_COPIES)
def _engram_sinkhorn_step_kernel(width: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_engram.lib.scaled_rows_tile import load_scaled, row_norms, rows_layout

    tile = RowTile.best(width)
    rows, groups, columns = tile.rows, tile.num_groups, tile.columns(width)
    # TileLang lays out a fragment of more columns than threads only if it has a multiple of their number.
    total_columns = columns if columns <= tile.threads else align(columns, tile.threads)
    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def engram_sinkhorn_step(
        matrix: T.Tensor((num_rows, width), "float32"),
        row_scale: T.Tensor((num_rows,), "float32"),
        col_scale: T.Tensor((width,), "float32"),
        row_norm: T.Tensor((num_rows,), "float32"),
        col_sumsq_partial: T.Tensor((NUM_PARTIALS, width), "float32"),
        eps: T.float32,
    ) -> None:
        with T.Kernel(NUM_PARTIALS, threads=tile.threads) as partial:
            first_row, end_row = (T.alloc_var("int32") for _ in range(2))
            range_rows = T.ceildiv(num_rows, NUM_PARTIALS)
            first_row = partial * range_rows
            end_row = T.min(first_row + range_rows, num_rows)
            # All ranges at once on an H200, which allows a thread 85 registers at most.
            T.annotate_min_blocks_per_sm(3 if tile.threads == 256 else 1)
            x, squares = (T.alloc_fragment((rows, columns), "float32") for _ in range(2))
            scales, norms, quotients = (T.alloc_fragment((rows,), "float32") for _ in range(3))
            sums = T.alloc_fragment((groups, columns), "float32")
            group_sums = T.alloc_shared((groups, columns), "float32")
            totals = T.alloc_fragment((total_columns,), "float32")
            T.annotate_layout({f: rows_layout(*f.shape, tile) for f in (x, squares, sums)})

            T.clear(sums)
            for step in T.serial(T.ceildiv(end_row - first_row, rows)):
                row = first_row + step * rows
                load_scaled(matrix, row_scale, col_scale, row, x, scales)
                row_norms(x, squares, norms, tile)
                for i in T.Parallel(rows):
                    quotients[i] = T.float32(1) / (norms[i] + eps)
                for i in T.Parallel(rows):
                    if row + i < end_row:
                        row_norm[row + i] = norms[i]
                        row_scale[row + i] = scales[i] * quotients[i]
                for u in T.unroll(tile.rows_per_thread):
                    for g, d in T.Parallel(groups, columns):
                        if row + u * groups + g < end_row:
                            y = x[u * groups + g, d] * quotients[u * groups + g]
                            sums[g, d] = sums[g, d] + y * y

            T.copy(sums, group_sums)
            T.clear(totals)
            for g in T.serial(groups):
                for d in T.Parallel(total_columns):
                    if d < width:
                        totals[d] = totals[d] + group_sums[g, d]
            T.copy(totals, col_sumsq_partial[partial, 0:total_columns])

    return engram_sinkhorn_step


@op(
    "tk_engram::engram_sinkhorn_step_out",
    mutates=("row_norm", "col_sumsq_partial", "row_scale"),
    reference="engram_sinkhorn_step",
)
def _engram_sinkhorn_step_out(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, row_norm: Tensor, col_sumsq_partial: Tensor
) -> None:
    num_rows, width = matrix.shape
    if num_rows == 0:
        col_sumsq_partial.zero_()
        return
    step = _engram_sinkhorn_step_kernel(width, get_arch(matrix.device))
    written = aligned(row_scale)
    step(aligned(matrix), written, aligned(col_scale), row_norm, col_sumsq_partial, eps)
    if written is not row_scale:
        row_scale.copy_(written)


@replayable
def engram_sinkhorn_step(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One Sinkhorn iteration over rows: x = (r · M) · c, norm = √Σ_d x², r ← r / (norm + eps); squares of columns.

    With q = 1 / (norm + eps), r becomes r · q in place, and y = x · q is squared and added up over rows for each
    column, in 396 ranges of ceil(R / 396) rows: the same bits on any GPU. In float32. The scale of a row of
    zeros is multiplied by 1 / eps: with eps = 1e-20 two iterations take it to infinity, and the third gives NaN.
    Source: TileKernels 2.1.0's function of this name.

    Args:
        matrix: M, float32 (R, D), contiguous, not written; D is 1 to 16384.
        row_scale: r, float32 (R), contiguous, updated in place, of no other argument's memory.
        col_scale: c, float32 (D), contiguous.
        eps: a number of at least 0.

    Returns:
        (row_norm, col_sumsq_partial): float32 (R), and float32 (396, D): sums of squares, of no rows zeros.

    Raises:
        TypeError: an argument is not a float32 tensor, or eps not a number.
        ValueError: a shape, stride or device does not fit, or D or eps is out of range.
    """
    num_rows, width = check_matrix(matrix, row_scale, col_scale)
    check.number("eps", eps, at_least=0)
    row_norm = matrix.new_empty((num_rows,))
    col_sumsq_partial = matrix.new_empty((NUM_PARTIALS, width))
    _engram_sinkhorn_step_out(matrix, row_scale, col_scale, float(eps), row_norm, col_sumsq_partial)
    return row_norm, col_sumsq_partial
