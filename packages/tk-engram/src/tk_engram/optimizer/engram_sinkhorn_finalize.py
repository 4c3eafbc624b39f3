"""engram_sinkhorn_finalize: the rows of a scaled matrix M (R, D) brought to one norm.

    x = (r · M) · c        out = x · (alpha / (√Σ_d x² + eps))

in float32, r a scale a row and c one a column.
Source: the optimizer step for embedding tables of TileKernels 2.1.0, `engram_sinkhorn_finalize`.

A thread block takes one tile of rows (`RowTile`), which stays in registers between the norm and the product.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import aligned
from tk_engram.lib.scaled_rows import DTYPES, RowTile, check_matrix


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


@op(
    "tk_engram::engram_sinkhorn_finalize_out",
    mutates=("out",),
    in_place={"out": ("matrix",)},
    reference="engram_sinkhorn_finalize",
)
def _engram_sinkhorn_finalize_out(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor
) -> None:
    num_rows, width = matrix.shape
    if num_rows == 0:
        return
    written = aligned(out)
    finalize = _engram_sinkhorn_finalize_kernel(width, get_arch(matrix.device))
    finalize(aligned(matrix), aligned(row_scale), aligned(col_scale), written, eps, alpha)
    if written is not out:
        out.copy_(written)


@replayable
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
    if out is None:
        out = matrix.new_empty((num_rows, width))
    else:
        check.tensor("out", out, DTYPES, (num_rows, width), device=matrix.device)
    _engram_sinkhorn_finalize_out(matrix, row_scale, col_scale, float(eps), float(alpha), out)
    return out
