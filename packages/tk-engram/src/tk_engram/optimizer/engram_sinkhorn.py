"""Sinkhorn iterations over the rows of a matrix M (R, D), for the optimizer of embedding tables.

    engram_sinkhorn_step          x = (r · M) · c    norm = √Σ_d x²    q = 1 / (norm + eps)    r ← r · q    y = x · q
                                  col_sumsq_partial[p, d] = Σ y[i, d]² over the p-th range of rows
    engram_sinkhorn_step_reduce   col_sumsq[d] = Σ_p col_sumsq_partial[p, d]
    engram_sinkhorn_finalize      x = (r · M) · c    out = x · (alpha / (√Σ_d x² + eps))

in float32, r a scale a row and c one a column; a range has ceil(R / 396) rows. M is not written. The next iteration's c
is left to the caller, who makes it of the sums. These begin with 0, p ascending, one addition a partial.
Source: the optimizer step for embedding tables of TileKernels 2.1.0, functions of these names.

In a step a thread block takes a range of rows and walks it in tiles (`RowTile`). Each group of threads that shares a
row sums the squares of columns in registers; the groups' sums are added up at the end, ascending. To add up partials, a
thread has one column, and 66 partials of it in flight. In the end a thread block takes one tile, which stays in
registers between the norm and the product.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_core.op import given_or_new, launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_engram.lib.scaled_rows import DTYPES, MAX_WIDTH, RowTile, check_matrix
from tk_engram.sizes import NUM_PARTIALS

_COLUMNS = 32
"""Columns of a thread block, few so that narrow matrices reach many SMs. Untuned."""
_IN_FLIGHT = 66
"""Partials whose loads are in flight together: a sixth of the 396 that the step makes. Untuned."""


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


@op(writes=("row_scale",))
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
    row_norm = new(matrix.new_empty, (num_rows,))
    col_sumsq_partial = new(matrix.new_empty, (NUM_PARTIALS, width))
    if launching(row_norm, col_sumsq_partial):
        if num_rows == 0:
            col_sumsq_partial.zero_()
        else:
            step = _engram_sinkhorn_step_kernel(width, get_arch(matrix.device))
            step(matrix, row_scale, col_scale, row_norm, col_sumsq_partial, float(eps))
    return row_norm, col_sumsq_partial


@kernel(pass_configs=DIRECT_COPIES)
def _engram_sinkhorn_step_reduce_kernel(arch: Arch) -> Any:
    import tilelang.language as T

    num_partials, width = T.dynamic("num_partials"), T.dynamic("width")

    @T.prim_func
    def engram_sinkhorn_step_reduce(
        col_sumsq_partial: T.Tensor((num_partials, width), "float32"),
        col_sumsq: T.Tensor((width,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(width, _COLUMNS), threads=_COLUMNS) as block:
            column = block * _COLUMNS
            partials = T.alloc_fragment((_IN_FLIGHT, _COLUMNS), "float32")
            sums = T.alloc_fragment((_COLUMNS,), "float32")
            T.annotate_layout({partials: T.Fragment(partials.shape, forward_fn=lambda p, d: (d, p))})
            T.clear(sums)
            for chunk in T.serial(T.ceildiv(num_partials, _IN_FLIGHT)):
                first = chunk * _IN_FLIGHT
                # Beyond the last partial come zeros, which change no sum that began with 0.
                T.copy(col_sumsq_partial[first : first + _IN_FLIGHT, column : column + _COLUMNS], partials)
                for p in T.unroll(_IN_FLIGHT):
                    for d in T.Parallel(_COLUMNS):
                        sums[d] = sums[d] + partials[p, d]
            T.copy(sums, col_sumsq[column : column + _COLUMNS])

    return engram_sinkhorn_step_reduce


@op(writes=("col_sumsq",), aligned=())
def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Add up partial sums of columns: col_sumsq[d] = Σ_p col_sumsq_partial[p, d], p ascending.

    In float32, beginning with 0; every bit equals the reference's. The caller makes the column scales of the sums.
    Source: TileKernels 2.1.0's function of this name.

    Args:
        col_sumsq_partial: float32 (P, D), contiguous, as `engram_sinkhorn_step` returned it; any P, D is 1 to 16384.
        col_sumsq: float32 (D), contiguous, to be written, of no other argument's memory.

    Raises:
        TypeError: an argument is not a float32 tensor.
        ValueError: a shape, stride or device does not fit, or D is out of range.
    """
    num_partials, width = check.tensor("col_sumsq_partial", col_sumsq_partial, DTYPES, ("P", "D"))
    check.in_range("D (columns of col_sumsq_partial)", width, 1, MAX_WIDTH)
    check.tensor("col_sumsq", col_sumsq, DTYPES, (width,), device=col_sumsq_partial.device)
    if launching(col_sumsq):
        if num_partials == 0:
            col_sumsq.zero_()
        else:
            _engram_sinkhorn_step_reduce_kernel(get_arch(col_sumsq.device))(col_sumsq_partial, col_sumsq)


@kernel(pass_configs=DIRECT_COPIES)
def _engram_sinkhorn_finalize_kernel(width: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_engram.lib.scaled_rows_tile import load_scaled, row_norms, rows_layout

    tile = RowTile.best(width)
    rows, columns = tile.rows, tile.columns(width)
    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def engram_sinkhorn_finalize(
        matrix: T.Tensor((num_rows, width), "float32"),
        row_scale: T.Tensor((num_rows,), "float32"),
        col_scale: T.Tensor((width,), "float32"),
        out: T.Tensor((num_rows, width), "float32"),
        eps: T.float32,
        alpha: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, rows), threads=tile.threads) as block:
            row = block * rows
            x, squares = (T.alloc_fragment((rows, columns), "float32") for _ in range(2))
            scales, norms = (T.alloc_fragment((rows,), "float32") for _ in range(2))
            T.annotate_layout({f: rows_layout(rows, columns, tile) for f in (x, squares)})

            load_scaled(matrix, row_scale, col_scale, row, x, scales)
            row_norms(x, squares, norms, tile)
            for i in T.Parallel(rows):
                scales[i] = alpha / (norms[i] + eps)
            for i, d in T.Parallel(rows, columns):
                x[i, d] = x[i, d] * scales[i]
            T.copy(x, out[row : row + rows, 0:columns])

    return engram_sinkhorn_finalize


@op(writes=("out",), in_place={"out": ("matrix",)})
def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """Scaled rows brought to the norm alpha: out = x · (alpha / (√Σ_d x² + eps)) with x = (r · M) · c.

    In float32. Source: TileKernels 2.1.0's function of this name.

    Args:
        matrix: M, float32 (R, D), contiguous; D is 1 to 16384.
        row_scale: r, float32 (R), contiguous.
        col_scale: c, float32 (D), contiguous.
        eps: a number of at least 0.
        alpha: a finite number.
        out: float32 (R, D), contiguous, to be written, `matrix` itself perhaps; None for a new tensor.

    Returns:
        float32 (R, D): `out`, if it was given.

    Raises:
        TypeError: an argument is not a float32 tensor, or eps or alpha not a number.
        ValueError: a shape, stride or device does not fit, or D, eps or alpha is out of range.
    """
    num_rows, width = check_matrix(matrix, row_scale, col_scale)
    check.number("eps", eps, at_least=0)
    check.number("alpha", alpha)
    out = given_or_new("out", out, matrix, (num_rows, width))
    if launching(out):
        finalize = _engram_sinkhorn_finalize_kernel(width, get_arch(matrix.device))
        finalize(matrix, row_scale, col_scale, out, float(eps), float(alpha))
    return out
